/*
program "half"
buffer x: f16[32, 64] global input
buffer y: f16[32, 64] global output
buffer z: bf16[32, 64] global output
loops i, j, v
run {
  block.x i in 32 {
    thread.x j in 16 {
      vectorized v in 4 {
        y[i, 4*j + v] = x[i, 4*j + v] * 3.0
        z[i, 4*j + v] = x[i, 4*j + v]
      }
    }
  }
}
*/
#pragma OPENCL FP_CONTRACT OFF

ushort bf16_bits(float x) {
    uint bits = as_uint(x);
    return isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__attribute__((reqd_work_group_size(16, 1, 1)))
kernel void run_0(global const half *restrict x, global half *restrict y, global ushort *restrict z) {
    const int i = get_group_id(0);
    const int thread_x = get_local_id(0);
    vstore_half4_rte((vload_half4(0, (x + 64 * i + 4 * thread_x)) * (float4)(3.0f)), 0, (y + 64 * i + 4 * thread_x));
    z[64 * i + 4 * thread_x] = bf16_bits(vload_half(64 * i + 4 * thread_x, x));
    z[64 * i + 4 * thread_x + 1] = bf16_bits(vload_half(64 * i + 4 * thread_x + 1, x));
    z[64 * i + 4 * thread_x + 2] = bf16_bits(vload_half(64 * i + 4 * thread_x + 2, x));
    z[64 * i + 4 * thread_x + 3] = bf16_bits(vload_half(64 * i + 4 * thread_x + 3, x));
}
