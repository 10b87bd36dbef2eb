/* One of two tensors.
 * Buffers: truth of one element, tensor where it holds, tensor where it does not, output. Parameters: bytes of a
 * tensor, and the truth for which there is none, or -1. */

NET_HOST int net_host_select(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *p) {
    (void)scratch;
    (void)runtime;
    int holds = *(const uint8_t *)buffers[0] != 0;
    if (holds == p[1]) return NET_HOST_NO_GRAPH;
    memcpy(buffers[3], buffers[holds ? 1 : 2], (size_t)p[0]);
    return 0;
}
