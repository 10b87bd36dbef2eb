/* Regions of an image in another size, as tf_crop_and_resize has it.
 * Buffers: input; where the region begins along each dimension, then where it ends (f64); output.
 * Parameters: type (f32 or f64), rank, how what lies between pixels is found (0 the nearest: half down, 1 half up, 2 down, 3 up; 4 by
 * straight lines, 5 by cubic curves), bits of the cubic coefficient and of what lies beyond the image (f64), whether
 * pixels beyond the image have no weight; then of each dimension: its size before and afterwards, bits of how much
 * narrower a pixel is than a tap (f64), and the most taps of a place.
 * Scratch: of each dimension, for each place afterwards one entry of 16 bytes and one for each tap. */

/* A pixel with its weight. The first one of a place has instead how many follow, and whether it is in the image. */
typedef struct net_tap {
    int64_t at;
    double weight;
} net_tap;

static double net_crop_weight(const int64_t *p, double distance) {
    double d = fabs(distance), a = net_host_real(p[3]);
    if (p[2] == 4) return d < 1 ? 1 - d : 0;
    if (d <= 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
    return d < 2 ? ((a * d - 5 * a) * d + 8 * a) * d - 4 * a : 0;
}

static int64_t net_crop_clamped(double at, int64_t n) {
    return at > 0 ? at < (double)(n - 1) ? (int64_t)at : n - 1 : 0;
}

static double net_crop_nearest(int64_t mode, double x) {
    /* Places within a millionth of the middle of two pixels count as the middle. */
    const double half = 0.5 + 1e-6;
    switch (mode) {
    case 0: return ceil(x - half);
    case 1: return floor(x + half);
    case 2: return floor(x);
    default: return ceil(x);
    }
}

/* Finds the pixels that place x of a dimension is made of. */
static void net_crop_place(const int64_t *p, const int64_t *dim, double x, net_tap *taps) {
    int64_t n = dim[0], count = 0;
    double narrow = net_host_real(dim[2]), reach = (p[2] == 5 ? 2 : 1) / narrow, sum = 0;
    taps[0].weight = x >= 0 && x <= (double)(n - 1);
    taps[0].at = 0;
    if (!taps[0].weight) return;
    if (p[2] < 4) {
        taps[0].at = 1;
        taps[1].at = net_crop_clamped(net_crop_nearest(p[2], x), n);
        taps[1].weight = 1;
        return;
    }
    for (double at = ceil(x - reach); at <= floor(x + reach) && count < dim[3]; at++) {
        double weight = net_crop_weight(p, (at - x) * narrow);
        if (weight == 0 || (p[5] && (at < 0 || at >= (double)n))) continue;
        count++;
        taps[count].at = net_crop_clamped(at, n);
        taps[count].weight = weight;
        sum += weight;
    }
    for (int64_t i = 1; i <= count && sum != 0; i++) taps[i].weight /= sum;
    taps[0].at = count;
}

/* Sum over the taps of the dimensions from d on, of which the first one's are at `places[d]`. */
static double net_crop_sum(const int64_t *p, net_tap *const *places, const void *x, int64_t d, int64_t base) {
    if (d == p[1]) return net_host_number(p[0], x, base);
    const net_tap *taps = places[d];
    double sum = 0;
    for (int64_t i = 1; i <= taps[0].at; i++)
        sum += taps[i].weight * net_crop_sum(p, places, x, d + 1, base * p[6 + 4 * d] + taps[i].at);
    return sum;
}

NET_HOST int net_host_crop(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    const double *region = buffers[1];
    int64_t rank = p[1], n = 1;
    net_tap *tables[16], *places[16], *next = scratch;
    (void)runtime;
    for (int64_t d = 0; d < rank; d++) {
        const int64_t *dim = p + 6 + 4 * d;
        double start = region[d], end = region[rank + d], last = (double)(dim[0] - 1);
        tables[d] = next;
        n *= dim[1];
        for (int64_t at = 0; at < dim[1]; at++, next += 1 + dim[3]) {
            double to = (double)(dim[1] - 1);
            double x = dim[1] > 1 ? start * last + (double)at * (end - start) * last / to : 0.5 * (start + end) * last;
            net_crop_place(p, dim, x, next);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i;
        int is_inside = 1;
        for (int64_t d = rank; d-- > 0; rest /= p[7 + 4 * d]) {
            places[d] = tables[d] + rest % p[7 + 4 * d] * (1 + p[9 + 4 * d]);
            is_inside = is_inside && places[d][0].weight != 0;
        }
        double x = is_inside ? net_crop_sum(p, places, buffers[0], 0, 0) : net_host_real(p[4]);
        net_host_store(p[0], buffers[2], i, x);
    }
    return 0;
}
