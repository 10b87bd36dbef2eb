/* A function of each element that kernels do not have, in double precision.
 * Buffers: input, output. Parameters: type (f32 or f64), elements, function (see below). */

NET_HOST int net_host_unary(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    static double (*const functions[])(double) = {acos, acosh, asin, asinh, atan, atanh};
    double (*f)(double) = functions[p[2]];
    (void)scratch;
    (void)runtime;
    if (p[0] == NET_TYPE_F32)
        for (int64_t i = 0; i < p[1]; i++) ((float *)buffers[1])[i] = (float)f(((const float *)buffers[0])[i]);
    else
        for (int64_t i = 0; i < p[1]; i++) ((double *)buffers[1])[i] = f(((const double *)buffers[0])[i]);
    return 0;
}
