/* A tensor with updates at some places, which replace what is there or are combined with it in their order.
 * Buffers: data; of each row of updates the place of its first element, -1 where there is none (i64); updates; output.
 * Parameters: type, elements of the data, rows of updates, elements of a row, and how they are combined: 0 replaces,
 * 1 adds, 2 multiplies, 3 takes the larger, 4 the smaller one. NaN stays NaN. */

#define NET_SCATTER(T, RESULT)                                            \
    do {                                                                  \
        T *restrict out = (T *)buffers[3];                                \
        const T *restrict from = (const T *)buffers[2];                   \
        for (int64_t row = 0; row < rows; row++) {                        \
            int64_t place = places[row];                                  \
            if (place < 0 || place > last) return NET_HOST_OUTSIDE;       \
            for (int64_t i = 0; i < width; i++) {                         \
                T a = out[place + i], b = *from++;                        \
                (void)a;                                                  \
                out[place + i] = (T)(RESULT);                             \
            }                                                             \
        }                                                                 \
        return 0;                                                         \
    } while (0)

/* Integers wrap around: U is unsigned and no smaller than an int. */
#define NET_SCATTER_COMBINED(T, U)                                        \
    switch (p[4]) {                                                       \
    case 1: NET_SCATTER(T, (U)a + (U)b);                                  \
    case 2: NET_SCATTER(T, (U)a * (U)b);                                  \
    case 3: NET_SCATTER(T, a == a && !(b <= a) ? b : a);                  \
    case 4: NET_SCATTER(T, a == a && !(b >= a) ? b : a);                  \
    default: return NET_HOST_OUTSIDE;                                     \
    }

NET_HOST int net_host_scatter(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    const int64_t *restrict places = buffers[1];
    int64_t rows = p[2], width = p[3], last = p[1] - width;
    (void)scratch;
    (void)runtime;
    memcpy(buffers[3], buffers[0], (size_t)p[1] * net_type_bytes(p[0]));
    if (p[4] == 0) {
        switch (net_type_bytes(p[0])) {
        case 1: NET_SCATTER(uint8_t, b);
        case 2: NET_SCATTER(uint16_t, b);
        case 4: NET_SCATTER(uint32_t, b);
        default: NET_SCATTER(uint64_t, b);
        }
    }
    switch (p[0]) {
    case NET_TYPE_F32: NET_SCATTER_COMBINED(float, float)
    case NET_TYPE_F64: NET_SCATTER_COMBINED(double, double)
    case NET_TYPE_I8: NET_SCATTER_COMBINED(int8_t, uint32_t)
    case NET_TYPE_U8: NET_SCATTER_COMBINED(uint8_t, uint32_t)
    case NET_TYPE_I32: NET_SCATTER_COMBINED(int32_t, uint32_t)
    case NET_TYPE_I64: NET_SCATTER_COMBINED(int64_t, uint64_t)
    case NET_TYPE_I16: NET_SCATTER_COMBINED(int16_t, uint32_t)
    case NET_TYPE_U16: NET_SCATTER_COMBINED(uint16_t, uint32_t)
    case NET_TYPE_U32: NET_SCATTER_COMBINED(uint32_t, uint32_t)
    case NET_TYPE_U64: NET_SCATTER_COMBINED(uint64_t, uint64_t)
    default: NET_SCATTER_COMBINED(uint8_t, uint32_t)
    }
}

#undef NET_SCATTER
#undef NET_SCATTER_COMBINED
