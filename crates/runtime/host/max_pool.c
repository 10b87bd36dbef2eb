/* The largest number of each window, and where it is in its plane's tensor.
 * Buffers: input [planes, image], output [planes, out], places (i64); numbers are f32.
 * Parameters: planes, dimensions of an image, whether places count columns first; then for each dimension sizes of the
 * image and the output, of a window, its stride, the distance of its elements, and the border before the image. */

/* Where in a plane an element of a window lies, or -1 beyond the image. */
static int64_t net_max_pool_place(const int64_t *p, int64_t window, int64_t inside) {
    int64_t place = 0, stride = 1;
    for (int64_t d = p[1] - 1; d >= 0; d--) {
        const int64_t *of = p + 3 + 6 * d;
        int64_t at = window % of[1] * of[3] + inside % of[2] * of[4] - of[5];
        if (at < 0 || at >= of[0]) return -1;
        place += at * stride;
        stride *= of[0];
        window /= of[1];
        inside /= of[2];
    }
    return place;
}

static int64_t net_max_pool_columns_first(const int64_t *p, int64_t place) {
    int64_t turned = 0;
    for (int64_t d = p[1] - 1; d >= 0; d--) {
        turned = turned * p[3 + 6 * d] + place % p[3 + 6 * d];
        place /= p[3 + 6 * d];
    }
    return turned;
}

NET_HOST int net_host_max_pool(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    int64_t area = 1, windows = 1, insides = 1;
    (void)scratch;
    (void)runtime;
    for (int64_t d = 0; d < p[1]; d++) {
        area *= p[3 + 6 * d];
        windows *= p[4 + 6 * d];
        insides *= p[5 + 6 * d];
    }
    for (int64_t plane = 0; plane < p[0]; plane++) {
        const float *x = (const float *)buffers[0] + plane * area;
        for (int64_t window = 0; window < windows; window++) {
            int64_t best = -1;
            for (int64_t inside = 0; inside < insides; inside++) {
                int64_t at = net_max_pool_place(p, window, inside);
                if (at >= 0 && (best < 0 || x[at] > x[best] || (x[at] != x[at] && x[best] == x[best]))) best = at;
            }
            ((float *)buffers[1])[plane * windows + window] = best < 0 ? -INFINITY : x[best];
            if (best < 0) best = 0;
            if (p[2]) best = net_max_pool_columns_first(p, best);
            ((int64_t *)buffers[2])[plane * windows + window] = plane * area + best;
        }
    }
    return 0;
}
