/* The largest number of each window, and where it is in its plane's tensor.
 * Buffers: input [planes, image], output [planes, out], places (i64).
 * Parameters: type (not of 64-bit integers), bits of the number of an empty window (f64), planes, dimensions of an image,
 * whether places count columns first; then for each dimension sizes of the image and the output, of a window, its
 * stride, the distance of its elements, and the border before the image. */

/* Where in a plane an element of a window lies, or -1 beyond the image. */
static int64_t net_max_pool_place(const int64_t *p, int64_t window, int64_t inside) {
    int64_t place = 0, stride = 1;
    for (int64_t d = p[3] - 1; d >= 0; d--) {
        const int64_t *of = p + 5 + 6 * d;
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
    for (int64_t d = p[3] - 1; d >= 0; d--) {
        turned = turned * p[5 + 6 * d] + place % p[5 + 6 * d];
        place /= p[5 + 6 * d];
    }
    return turned;
}

NET_HOST int net_host_max_pool(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    int64_t area = 1, windows = 1, insides = 1;
    (void)scratch;
    (void)runtime;
    for (int64_t d = 0; d < p[3]; d++) {
        area *= p[5 + 6 * d];
        windows *= p[6 + 6 * d];
        insides *= p[7 + 6 * d];
    }
    for (int64_t plane = 0; plane < p[2]; plane++) {
        for (int64_t window = 0; window < windows; window++) {
            int64_t best = -1;
            double largest = net_host_real(p[1]);
            for (int64_t inside = 0; inside < insides; inside++) {
                int64_t at = net_max_pool_place(p, window, inside);
                if (at < 0) continue;
                double x = net_host_number(p[0], buffers[0], plane * area + at);
                if (best >= 0 && !(x > largest) && !(x != x && largest == largest)) continue;
                best = at;
                largest = x;
            }
            net_host_store(p[0], buffers[1], plane * windows + window, largest);
            if (best < 0) best = 0;
            if (p[4]) best = net_max_pool_columns_first(p, best);
            ((int64_t *)buffers[2])[plane * windows + window] = plane * area + best;
        }
    }
    return 0;
}
