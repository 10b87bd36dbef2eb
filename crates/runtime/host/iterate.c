/* The number of an iteration, and whether it takes place.
 * Buffers: most iterations where there are such, condition where there is one, number, truth. Parameters: whether there
 * is a most, whether there is a condition, and whether the iteration is the first one; else the number goes on. */

NET_HOST int net_host_iterate(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    const int64_t *most = p[0] ? buffers[0] : NULL;
    const uint8_t *condition = p[1] ? buffers[p[0]] : NULL;
    int64_t *number = buffers[p[0] + p[1]];
    *number = p[2] ? 0 : *number + 1;
    *(uint8_t *)buffers[p[0] + p[1] + 1] = (!condition || *condition) && (!most || *number < *most);
    return 0;
}
