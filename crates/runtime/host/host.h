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

static inline double net_host_real(int64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
