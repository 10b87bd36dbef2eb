/* Random numbers, other ones in each call unless there is a key.
 * Buffers: output. Parameters: type (f32 or f64), elements, whether they are of a normal distribution, mean or lower
 * bound, and deviation or width (bits of f64), whether there is a key, key. */

/* Word `at` of the generator splitmix64 (Steele, Lea and Flood 2014) of a key. */
static uint64_t net_random_word(uint64_t key, uint64_t at) {
    uint64_t z = key + (at + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* A key that neither another call nor, most likely, another process has. */
static uint64_t net_random_key(void) {
    static uint64_t n_calls;
    uint64_t call = __atomic_fetch_add(&n_calls, 1, __ATOMIC_RELAXED);
    uint64_t key = net_random_word((uint64_t)time(NULL), (uint64_t)clock());
    return net_random_word(key ^ (uint64_t)(uintptr_t)&n_calls, call);
}

static double net_random_unit(uint64_t word, int bits) {
    return (double)(word >> (64 - bits)) / (double)(UINT64_C(1) << bits);
}

NET_HOST int net_host_random(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    uint64_t n = (uint64_t)p[1], key = p[5] ? (uint64_t)p[6] : net_random_key();
    double first = net_host_real(p[3]), by = net_host_real(p[4]), pair[2] = {0, 0};
    (void)scratch;
    (void)runtime;
    for (uint64_t i = 0; i < n; i++) {
        if (p[2] && i % 2 == 0) {
            double radius = sqrt(-2 * log(1 - net_random_unit(net_random_word(key, i), 53)));
            double angle = 6.283185307179586 * net_random_unit(net_random_word(key, i + 1), 53);
            pair[0] = radius * cos(angle);
            pair[1] = radius * sin(angle);
        } else if (!p[2]) {
            pair[i % 2] = net_random_unit(net_random_word(key, i), p[0] == NET_TYPE_F64 ? 53 : 24);
        }
        net_host_store(p[0], buffers[0], (int64_t)i, first + by * pair[i % 2]);
    }
    return 0;
}
