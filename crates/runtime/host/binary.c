/* A function of two elements that kernels do not have.
 * Buffers: two inputs, output, all of one type and size.
 * Parameters: type, elements, function: 0 and, 1 or, 2 exclusive or of bits; 3 bits moved to the left, 4 to the right;
 * the rest of a division, 5 with the sign of the dividend, 6 with that of the divisor; 7 a power of i64. Whole numbers
 * that are divided by 0 leave 0. */

/* A power modulo 2^64; one with a negative exponent is 0, but of 1 and of -1. */
static int64_t net_binary_power(int64_t a, int64_t b) {
    uint64_t power = 1, square = (uint64_t)a;
    if (b < 0 && a != 1 && a != -1) return 0;
    for (uint64_t rest = (uint64_t)b; rest; rest >>= 1, square *= square)
        if (rest & 1) power *= square;
    return (int64_t)power;
}

static int64_t net_binary_whole(int64_t function, int64_t a, int64_t b, int64_t n_bits) {
    int64_t rest = 0;
    switch (function) {
    case 0: return a & b;
    case 1: return a | b;
    case 2: return a ^ b;
    case 3: return b >= 0 && b < n_bits ? (int64_t)((uint64_t)a << b) : 0;
    /* Beyond the width, the sign is left. */
    case 4: return b >= 0 && b < 64 ? a >> b : a < 0 ? -1 : 0;
    case 7: return net_binary_power(a, b);
    default:
        /* Of -1 the rest is 0, also where the quotient is too large. */
        if (b != 0 && b != -1) rest = a % b;
        return function == 6 && rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }
}

static uint64_t net_binary_unsigned(int64_t function, uint64_t a, uint64_t b) {
    switch (function) {
    case 0: return a & b;
    case 1: return a | b;
    case 2: return a ^ b;
    case 3: return b < 64 ? a << b : 0;
    case 4: return b < 64 ? a >> b : 0;
    default: return b != 0 ? a % b : 0;
    }
}

/* The rest is exact: so is the nearest one, and what is added to that. */
static double net_binary_rest(int64_t function, double a, double b) {
    double rest = remainder(fabs(a), fabs(b));
    if (rest < 0) rest += fabs(b);
    rest = copysign(rest, a);
    return function == 6 && rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

#define NET_BINARY(T, RESULT)                                         \
    for (int64_t i = 0; i < p[1]; i++) {                              \
        T a = ((const T *)buffers[0])[i], b = ((const T *)buffers[1])[i]; \
        ((T *)buffers[2])[i] = (T)(RESULT);                           \
    }                                                                 \
    return 0

NET_HOST int net_host_binary(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    switch (p[0]) {
    case NET_TYPE_F32: NET_BINARY(float, net_binary_rest(p[2], a, b));
    case NET_TYPE_F64: NET_BINARY(double, net_binary_rest(p[2], a, b));
    case NET_TYPE_I8: NET_BINARY(int8_t, net_binary_whole(p[2], a, b, 8));
    case NET_TYPE_I32: NET_BINARY(int32_t, net_binary_whole(p[2], a, b, 32));
    case NET_TYPE_I64: NET_BINARY(int64_t, net_binary_whole(p[2], a, b, 64));
    case NET_TYPE_I16: NET_BINARY(int16_t, net_binary_whole(p[2], a, b, 16));
    case NET_TYPE_U16: NET_BINARY(uint16_t, net_binary_whole(p[2], a, b, 16));
    case NET_TYPE_U32: NET_BINARY(uint32_t, net_binary_whole(p[2], a, b, 32));
    case NET_TYPE_U64: NET_BINARY(uint64_t, net_binary_unsigned(p[2], a, b));
    default: NET_BINARY(uint8_t, net_binary_whole(p[2], a, b, 8));
    }
}

#undef NET_BINARY
