NET_API uint32_t net_abi(void) { return NET_ABI; }
NET_API const char *net_build(void) { return net_build_text; }
NET_API size_t net_inputs(void) { return NET_INPUTS; }
NET_API size_t net_outputs(void) { return NET_OUTPUTS; }
NET_API const net_tensor *net_input(size_t i) {
    return i <= NET_INPUTS && net_input_table[i].name ? &net_input_table[i] : NULL;
}
NET_API const net_tensor *net_output(size_t i) {
    return i <= NET_OUTPUTS && net_output_table[i].name ? &net_output_table[i] : NULL;
}

