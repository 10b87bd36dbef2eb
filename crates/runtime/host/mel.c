/* Weights from the frequencies of a Fourier transform to mel bands.
 * Buffers: sample rate (i64), lowest and highest frequency (f64), output [length / 2 + 1, bands] (f64).
 * Parameters: length of the transform, bands. */

static double net_mel(double hertz) { return 2595 * log1p(hertz / 700) / log(10); }

/* Row at which a band begins. */
static double net_mel_row(int64_t length, double rate, double low, double step, int64_t band) {
    double hertz = 700 * expm1(((double)band * step + low) / 2595 * log(10));
    double row = floor((double)(length + 1) * hertz / rate);
    return row > 0 ? row : 0;
}

NET_HOST int net_host_mel(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    int64_t length = p[0], rows = length / 2 + 1, bands = p[1];
    double rate = (double)*(const int64_t *)buffers[0], *out = buffers[3];
    double low = net_mel(*(const double *)buffers[1]), high = net_mel(*(const double *)buffers[2]);
    double step = (high - low) / ((double)bands + 2);
    (void)scratch;
    (void)runtime;
    memset(out, 0, (size_t)(rows * bands) * sizeof *out);
    for (int64_t band = 0; band < bands; band++) {
        double ends[3];
        for (int64_t i = 0; i < 3; i++) ends[i] = net_mel_row(length, rate, low, step, band + i);
        double left = ends[0], centre = ends[1], right = ends[2];
        if (!(right <= (double)rows)) return NET_HOST_OUTSIDE;
        for (int64_t row = 0; row < rows; row++) {
            double *to = &out[row * bands + band], at = (double)row;
            if (left == centre && at == centre) *to = 1;
            if (left < centre && at >= left && at <= centre) *to = (at - left) / (centre - left);
            if (at >= centre && at < right) *to = (right - at) / (right - centre);
        }
    }
    return 0;
}
