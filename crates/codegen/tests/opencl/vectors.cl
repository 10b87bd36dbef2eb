/*
program "vectors"
buffer x: f32[64, 64] global input
buffer y: f32[64, 64] global output
buffer s: f32[8] register temporary
loops i, j, v, w
run {
  block.x i in 64 {
    thread.x j in 8 {
      alloc s
      vectorized v in 8 {
        s[v] = x[i, 8*j + v] + x[v, i]
      }
      vectorized w in 4 {
        y[i, 8*j + w] = s[w] * x[0, 0] + s[7 - w]
      }
      vectorized w in 4 {
        y[i, 8*j + w + 4] = s[w + 4] * s[7]
      }
    }
  }
}
*/
#pragma OPENCL FP_CONTRACT OFF

__attribute__((reqd_work_group_size(8, 1, 1)))
kernel void run_0(global const float *restrict x, global float *restrict y) {
    const int i = get_group_id(0);
    const int thread_x = get_local_id(0);
    float s[8] __attribute__((aligned(32)));
    *(private float8 *)s = (*(global const float8 *)(x + 64 * i + 8 * thread_x) + (float8)(x[i], x[i + 64], x[i + 128], x[i + 192], x[i + 256], x[i + 320], x[i + 384], x[i + 448]));
    *(global float4 *)(y + 64 * i + 8 * thread_x) = fma(*(private const float4 *)s, (float4)(x[0]), (float4)(s[7], s[6], s[5], s[4]));
    *(global float4 *)(y + 64 * i + 8 * thread_x + 4) = (*(private const float4 *)(s + 4) * (float4)(s[7]));
}
