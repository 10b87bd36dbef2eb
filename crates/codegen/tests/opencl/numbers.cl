/*
program "numbers"
buffer ids: i64[32] global input
buffer table: f64[100, 8] global input
buffer out: f64[32, 8] global output
buffer bytes: i8[32, 8] global output
loops i, j
run {
  block.x i in 32 {
    thread.x j in 8 {
      out[i, j] = table[at(ids[i]), j] + index(i)
      bytes[i, j] = ids[i] * 3.0
    }
  }
}
*/
#pragma OPENCL FP_CONTRACT OFF

#pragma OPENCL EXTENSION cl_khr_fp64 : enable

long place_of(long n, long extent) { return clamp(n < 0 ? n + extent : n, 0L, extent - 1L); }

__attribute__((reqd_work_group_size(8, 1, 1)))
kernel void run_0(global const long *restrict ids, global const double *restrict table, global double *restrict out, global char *restrict bytes) {
    const int i = get_group_id(0);
    const int thread_x = get_local_id(0);
    out[8 * i + thread_x] = (table[8 * place_of(ids[i], 100) + (thread_x)] + (double)(i));
    bytes[8 * i + thread_x] = convert_char(as_int(as_uint((int)ids[i]) * as_uint(3)));
}
