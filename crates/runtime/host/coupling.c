/* Probabilities of k classes, of those of the first class of each pair (Wu, Lin, Weng: Probability estimates for
 * multi-class classification by pairwise coupling, 2004, second approach, by the iteration of LIBSVM).
 * Buffers: input [rows, k * (k - 1) / 2], output [rows, k]; numbers are f32. Parameters: rows, k.
 * Scratch: 2 * k * k + 2 * k numbers of 8 bytes. */

static void net_couple(double *r, int64_t k) {
    double *q = r + k * k, *p = q + k * k, *qp = p + k, limit = 0.005 / (double)k;
    for (int64_t i = 0; i < k; i++) {
        double sum = 0;
        for (int64_t j = 0; j < k; j++) {
            if (j == i) continue;
            sum += r[j * k + i] * r[j * k + i];
            q[i * k + j] = -r[j * k + i] * r[i * k + j];
        }
        q[i * k + i] = sum;
        p[i] = 1 / (double)k;
    }
    for (int round = 0; round < 100; round++) {
        double pqp = 0;
        int is_done = 1;
        for (int64_t i = 0; i < k; i++) {
            qp[i] = 0;
            for (int64_t j = 0; j < k; j++) qp[i] += q[i * k + j] * p[j];
            pqp += p[i] * qp[i];
        }
        for (int64_t i = 0; i < k; i++) is_done = is_done && fabs(qp[i] - pqp) < limit;
        if (is_done) return;
        for (int64_t i = 0; i < k; i++) {
            double own = q[i * k + i], step = (pqp - qp[i]) / own;
            p[i] += step;
            pqp = (pqp + step * (step * own + 2 * qp[i])) / (1 + step) / (1 + step);
            for (int64_t j = 0; j < k; j++) {
                qp[j] = (qp[j] + step * q[i * k + j]) / (1 + step);
                p[j] /= 1 + step;
            }
        }
    }
}

NET_HOST int net_host_coupling(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    const float *pairs = buffers[0];
    double *r = scratch;
    int64_t k = p[1];
    (void)runtime;
    for (int64_t row = 0; row < p[0]; row++) {
        for (int64_t i = 0; i < k; i++) {
            for (int64_t j = i + 1; j < k; j++) {
                r[i * k + j] = *pairs++;
                r[j * k + i] = 1 - r[i * k + j];
            }
        }
        net_couple(r, k);
        for (int64_t i = 0; i < k; i++) ((float *)buffers[1])[row * k + i] = (float)r[2 * k * k + i];
    }
    return 0;
}
