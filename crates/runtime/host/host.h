/* Host operators: what no kernel computes. Each is a function of its buffers, inputs before outputs, all packed and
 * row-major, and of its parameters, which say types, sizes and what else it depends on. It allocates nothing; scratch
 * memory is what it says it needs. What it returns is 0, or what is wrong with its inputs. */

/* An index leads out of a tensor. */
#define NET_HOST_OUTSIDE 8

/* A condition chooses a graph that refuses the sizes of its inputs. */
#define NET_HOST_NO_GRAPH 9

/* Types of elements, as parameters say them. */
enum {
    NET_TYPE_F32,
    NET_TYPE_F64,
    NET_TYPE_F16,
    NET_TYPE_BF16,
    NET_TYPE_I8,
    NET_TYPE_U8,
    NET_TYPE_I32,
    NET_TYPE_I64,
    NET_TYPE_BOOL,
    NET_TYPE_I16,
    NET_TYPE_U16,
    NET_TYPE_U32,
    NET_TYPE_U64
};

static inline size_t net_type_bytes(int64_t type) {
    static const unsigned char bytes[] = {4, 8, 2, 2, 1, 1, 4, 8, 1, 2, 2, 4, 8};
    return bytes[type];
}

/* An element of f32, f64 or an integer type of at most 32 bits. */
static inline double net_host_number(int64_t type, const void *x, int64_t at) {
    switch (type) {
    case NET_TYPE_F32: return ((const float *)x)[at];
    case NET_TYPE_F64: return ((const double *)x)[at];
    case NET_TYPE_I8: return ((const int8_t *)x)[at];
    case NET_TYPE_I16: return ((const int16_t *)x)[at];
    case NET_TYPE_I32: return ((const int32_t *)x)[at];
    case NET_TYPE_U16: return ((const uint16_t *)x)[at];
    case NET_TYPE_U32: return ((const uint32_t *)x)[at];
    default: return ((const uint8_t *)x)[at];
    }
}

/* Stores an element of one of these types, which holds the number. */
static inline void net_host_store(int64_t type, void *to, int64_t at, double x) {
    switch (type) {
    case NET_TYPE_F32: ((float *)to)[at] = (float)x; break;
    case NET_TYPE_F64: ((double *)to)[at] = x; break;
    case NET_TYPE_I8: ((int8_t *)to)[at] = (int8_t)x; break;
    case NET_TYPE_I16: ((int16_t *)to)[at] = (int16_t)x; break;
    case NET_TYPE_I32: ((int32_t *)to)[at] = (int32_t)x; break;
    case NET_TYPE_U16: ((uint16_t *)to)[at] = (uint16_t)x; break;
    case NET_TYPE_U32: ((uint32_t *)to)[at] = (uint32_t)x; break;
    default: ((uint8_t *)to)[at] = (uint8_t)x;
    }
}

static inline double net_host_real(int64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
