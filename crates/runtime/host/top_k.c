/* The largest or smallest elements along a dimension, the best first, of equal ones the first.
 * Buffers: input [outer, n, inner], output [outer, k, inner], their places along the dimension (i64).
 * Parameters: type, outer, n, inner, k, whether the largest are taken.
 * Scratch: k entries of 16 bytes. */

typedef struct net_top {
    int64_t key, at;
} net_top;

/* A number that is larger where the element is. NaN is the largest, and zeros are equal, whatever their signs. */
static int64_t net_top_real(int64_t bits, int64_t magnitude, int64_t infinity) {
    if (magnitude > infinity) return INT64_MAX;
    return bits < 0 ? -magnitude : magnitude;
}

static int64_t net_top_key(int64_t type, const void *x, int64_t i) {
    switch (type) {
    case NET_TYPE_F32: {
        int32_t bits;
        memcpy(&bits, (const char *)x + 4 * i, 4);
        return net_top_real(bits, bits & INT32_MAX, 0x7f800000);
    }
    case NET_TYPE_F64: {
        int64_t bits;
        memcpy(&bits, (const char *)x + 8 * i, 8);
        return net_top_real(bits, bits & INT64_MAX, 0x7ff0000000000000);
    }
    case NET_TYPE_F16:
    case NET_TYPE_BF16: {
        int16_t bits;
        memcpy(&bits, (const char *)x + 2 * i, 2);
        return net_top_real(bits, bits & INT16_MAX, type == NET_TYPE_F16 ? 0x7c00 : 0x7f80);
    }
    case NET_TYPE_I8: return ((const int8_t *)x)[i];
    case NET_TYPE_I32: return ((const int32_t *)x)[i];
    case NET_TYPE_I64: return ((const int64_t *)x)[i];
    case NET_TYPE_I16: return ((const int16_t *)x)[i];
    case NET_TYPE_U16: return ((const uint16_t *)x)[i];
    case NET_TYPE_U32: return ((const uint32_t *)x)[i];
    case NET_TYPE_U64: {
        int64_t bits;
        memcpy(&bits, (const char *)x + 8 * i, 8);
        return bits ^ INT64_MIN;
    }
    default: return ((const uint8_t *)x)[i];
    }
}

static int net_top_is_better(net_top a, net_top b) { return a.key > b.key || (a.key == b.key && a.at < b.at); }

/* Puts an entry into a heap of n whose root is the worst, from a place on whose own entry is free. */
static void net_top_sift(net_top *heap, int64_t n, int64_t at, net_top x) {
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && net_top_is_better(heap[child], heap[child + 1])) child++;
        if (!net_top_is_better(x, heap[child])) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

NET_HOST int net_host_top_k(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    int64_t outer = p[1], n = p[2], inner = p[3], k = p[4];
    size_t bytes = net_type_bytes(p[0]);
    net_top *heap = scratch;
    (void)runtime;
    for (int64_t o = 0; o < outer && k > 0; o++) {
        for (int64_t i = 0; i < inner; i++) {
            for (int64_t j = 0; j < n; j++) {
                int64_t key = net_top_key(p[0], buffers[0], (o * n + j) * inner + i);
                net_top x = {p[5] ? key : ~key, j};
                if (j < k) {
                    heap[j] = x;
                    if (j == k - 1)
                        for (int64_t at = k / 2; at-- > 0;) net_top_sift(heap, k, at, heap[at]);
                } else if (net_top_is_better(x, heap[0])) {
                    net_top_sift(heap, k, 0, x);
                }
            }
            /* The worst ones leave the heap first. */
            for (int64_t j = k; j-- > 0;) {
                net_top worst = heap[0];
                net_top_sift(heap, j, 0, heap[j]);
                int64_t to = (o * k + j) * inner + i, from = (o * n + worst.at) * inner + i;
                memcpy((char *)buffers[1] + (size_t)to * bytes, (const char *)buffers[0] + (size_t)from * bytes, bytes);
                ((int64_t *)buffers[2])[to] = worst.at;
            }
        }
    }
    return 0;
}
