/* A row of a tensor; a number from its end where that is negative, and the nearest row of one beyond it.
 * Buffers: the tensor, the row's number, the row. Parameters: bytes of a row, number of rows. */

NET_HOST int net_host_take(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    int64_t at = *(const int64_t *)buffers[1];
    if (at < 0) at += p[1];
    if (at < 0) at = 0;
    if (at >= p[1]) at = p[1] - 1;
    memcpy(buffers[2], (const char *)buffers[0] + at * p[0], (size_t)p[0]);
    return 0;
}
