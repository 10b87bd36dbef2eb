/* Regions of images, each divided into bins, with the mean or the largest of samples in a bin.
 * Buffers: images [n, c, height, width], regions [m, 4] (left, top, right, bottom), the image of each region (i64),
 * output [m, c, rows, columns].
 * Parameters: type of pixels and regions (f32 or f64), n, c, height, width, m, rows, columns, samples of a bin along a dimension (0: as many as there are
 * pixels), whether the largest is taken, whether pixels have their centres at halves, bits of the scale (f64). */

typedef struct net_roi_taps {
    int64_t at[4];
    double weight[4];
} net_roi_taps;

/* The two pixels around a place along a dimension of n, and how near to the second one it is. */
static void net_roi_split(double x, int64_t n, int64_t *low, int64_t *high, double *part) {
    if (x < 0) x = 0;
    *low = x < (double)(n - 1) ? (int64_t)x : n - 1;
    *high = *low < n - 1 ? *low + 1 : n - 1;
    *part = *low == n - 1 ? 0 : x - (double)*low;
}

static net_roi_taps net_roi_corners(double y, double x, int64_t height, int64_t width) {
    net_roi_taps taps = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    int64_t top, bottom, left, right;
    double v, h;
    if (!(y >= -1 && y <= (double)height && x >= -1 && x <= (double)width)) return taps;
    net_roi_split(y, height, &top, &bottom, &v);
    net_roi_split(x, width, &left, &right, &h);
    net_roi_taps found = {
        {top * width + left, top * width + right, bottom * width + left, bottom * width + right},
        {(1 - v) * (1 - h), (1 - v) * h, v * (1 - h), v * h},
    };
    return found;
}

NET_HOST int net_host_roi_align(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    int64_t n = p[1], c = p[2], height = p[3], width = p[4], rows = p[6], columns = p[7];
    double scale = net_host_real(p[11]), offset = p[10] ? 0.5 : 0, least = p[10] ? 0 : 1;
    (void)scratch;
    (void)runtime;
    for (int64_t m = 0; m < p[5]; m++) {
        double region[4];
        for (int64_t i = 0; i < 4; i++) region[i] = net_host_number(p[0], buffers[1], 4 * m + i);
        int64_t image = ((const int64_t *)buffers[2])[m];
        if (image < 0 || image >= n) return NET_HOST_OUTSIDE;
        double left = region[0] * scale - offset, top = region[1] * scale - offset;
        double high = region[3] * scale - offset - top, wide = region[2] * scale - offset - left;
        double by = (high > least ? high : least) / (double)rows, bx = (wide > least ? wide : least) / (double)columns;
        double ny = p[8] ? (double)p[8] : ceil(by), nx = p[8] ? (double)p[8] : ceil(bx);
        /* No region has that many pixels. */
        if (!(ny * nx <= 1 << 24)) return NET_HOST_OUTSIDE;
        for (int64_t channel = 0; channel < c; channel++) {
            int64_t pixels = (image * c + channel) * height * width, to = (m * c + channel) * rows * columns;
            for (int64_t at = 0; at < rows * columns; at++) {
                double sum = 0, largest = -INFINITY;
                for (double i = 0; i < ny; i++) {
                    for (double j = 0; j < nx; j++) {
                        double y = top + ((double)(at / columns) + (i + 0.5) / ny) * by;
                        double x = left + ((double)(at % columns) + (j + 0.5) / nx) * bx;
                        net_roi_taps taps = net_roi_corners(y, x, height, width);
                        for (int k = 0; k < 4; k++) {
                            double weighed = net_host_number(p[0], buffers[0], pixels + taps.at[k]) * taps.weight[k];
                            sum += weighed;
                            if (weighed > largest) largest = weighed;
                        }
                    }
                }
                net_host_store(p[0], buffers[3], to + at, p[9] ? largest : sum / (ny * nx > 1 ? ny * nx : 1));
            }
        }
    }
    return 0;
}
