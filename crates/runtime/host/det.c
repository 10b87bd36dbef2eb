/* Determinants of square matrices, by elimination in double precision.
 * Buffers: input [matrices, n, n], output [matrices]. Parameters: type (f32 or f64), matrices, n.
 * Scratch: n * n numbers of 8 bytes. */

static double net_det(double *a, int64_t n) {
    double det = 1;
    for (int64_t k = 0; k < n; k++) {
        int64_t best = k;
        for (int64_t i = k; i < n; i++)
            if (fabs(a[i * n + k]) >= fabs(a[best * n + k])) best = i;
        if (a[best * n + k] == 0) return 0;
        for (int64_t j = 0; j < n && best != k; j++) {
            double x = a[k * n + j];
            a[k * n + j] = a[best * n + j];
            a[best * n + j] = x;
        }
        det *= best == k ? a[k * n + k] : -a[k * n + k];
        for (int64_t i = k + 1; i < n; i++) {
            double factor = a[i * n + k] / a[k * n + k];
            for (int64_t j = k; j < n; j++) a[i * n + j] -= factor * a[k * n + j];
        }
    }
    return det;
}

NET_HOST int net_host_det(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    double *a = scratch;
    int64_t n = p[2];
    (void)runtime;
    for (int64_t m = 0; m < p[1]; m++) {
        for (int64_t i = 0; i < n * n; i++)
            a[i] = net_host_number(p[0], buffers[0], m * n * n + i);
        net_host_store(p[0], buffers[1], m, net_det(a, n));
    }
    return 0;
}
