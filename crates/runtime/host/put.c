/* A row of a tensor, whose others stay as they are.
 * Buffers: the row, its number, the tensor. Parameters: bytes of a row, number of rows. */

NET_HOST int net_host_put(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    int64_t at = *(const int64_t *)buffers[1];
    if (at < 0 || at >= p[1]) return NET_HOST_OUTSIDE;
    memcpy((char *)buffers[2] + at * p[0], buffers[0], (size_t)p[0]);
    return 0;
}
