/* Running sums or products along a dimension.
 * Buffers: input [outer, n, inner], output.
 * Parameters: type, outer, n, inner, whether they run backwards, leave out their own element, and multiply. */

#define NET_CUMULATIVE(T, A)                                                            \
    for (int64_t o = 0; o < p[1]; o++) {                                                \
        for (int64_t i = 0; i < p[3]; i++) {                                            \
            A sum = p[6] ? 1 : 0;                                                       \
            for (int64_t j = 0; j < p[2]; j++) {                                        \
                int64_t at = (o * p[2] + (p[4] ? p[2] - 1 - j : j)) * p[3] + i;         \
                A x = (A)((const T *)buffers[0])[at], next = p[6] ? sum * x : sum + x;  \
                ((T *)buffers[1])[at] = (T)(p[5] ? sum : next);                         \
                sum = next;                                                             \
            }                                                                           \
        }                                                                               \
    }                                                                                   \
    return 0

NET_HOST int net_host_cumulative(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    switch (p[0]) {
    case NET_TYPE_F32: NET_CUMULATIVE(float, double);
    case NET_TYPE_F64: NET_CUMULATIVE(double, double);
    case NET_TYPE_I32: NET_CUMULATIVE(int32_t, uint32_t);
    default: NET_CUMULATIVE(int64_t, uint64_t);
    }
}

#undef NET_CUMULATIVE
