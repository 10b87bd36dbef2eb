/*
matmul:m=64,n=64,k=30
split i 16 -> io ii
split j 32 -> jo jm
split jm 4 -> ji jv
split k 8 -> ko ki shrink
reorder io jo ko ii ji ki jv
stage A at ko -> A.s 1 0 shared
stage B at ko -> B.s 0 1 shared
accumulate C at jo -> C.r
unroll ki
vectorize jv
bind A.s.0 thread.y
bind A.s.1 thread.x
split B.s.1 4 -> B.s.x B.s.v
bind B.s.0 thread.y
bind B.s.x thread.x
vectorize B.s.v
bind io block.y
bind jo block.x
bind ii thread.y
bind ji thread.x
*/
#pragma OPENCL FP_CONTRACT OFF

__attribute__((reqd_work_group_size(16, 16, 1)))
kernel void run_0(global const float *restrict A, global const float *restrict B, global float *restrict C) {
    local float A_s[128] __attribute__((aligned(128)));
    local float B_s[256] __attribute__((aligned(128)));
    const int jo = get_group_id(0);
    const int io = get_group_id(1);
    const int thread_x = get_local_id(0);
    const int thread_y = get_local_id(1);
    float C_r[4] __attribute__((aligned(16)));
    if (thread_x < 8) {
        *(private float4 *)C_r = (float4)(0.0f);
    }
    for (int ko = 0; ko < 4; ++ko) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (thread_y < min((int)(8), (int)(-8 * ko + 30))) {
            A_s[thread_x + 16 * thread_y] = A[480 * io + 8 * ko + 30 * thread_x + thread_y];
        }
        if ((thread_y < min((int)(8), (int)(-8 * ko + 30))) && (thread_x < 8)) {
            *(local float4 *)(B_s + 4 * thread_x + 32 * thread_y) = *(global const float4 *)(B + 32 * jo + 512 * ko + 4 * thread_x + 64 * thread_y);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (thread_x < 8) {
            *(private float4 *)C_r = fma((float4)(A_s[thread_y]), *(local const float4 *)(B_s + 4 * thread_x), *(private const float4 *)C_r);
            *(private float4 *)C_r = fma((float4)(A_s[thread_y + 16]), *(local const float4 *)(B_s + 4 * thread_x + 32), *(private const float4 *)C_r);
            *(private float4 *)C_r = fma((float4)(A_s[thread_y + 32]), *(local const float4 *)(B_s + 4 * thread_x + 64), *(private const float4 *)C_r);
            *(private float4 *)C_r = fma((float4)(A_s[thread_y + 48]), *(local const float4 *)(B_s + 4 * thread_x + 96), *(private const float4 *)C_r);
            *(private float4 *)C_r = fma((float4)(A_s[thread_y + 64]), *(local const float4 *)(B_s + 4 * thread_x + 128), *(private const float4 *)C_r);
            *(private float4 *)C_r = fma((float4)(A_s[thread_y + 80]), *(local const float4 *)(B_s + 4 * thread_x + 160), *(private const float4 *)C_r);
            if (6 < min((int)(8), (int)(-8 * ko + 30))) {
                *(private float4 *)C_r = fma((float4)(A_s[thread_y + 96]), *(local const float4 *)(B_s + 4 * thread_x + 192), *(private const float4 *)C_r);
            }
            if (7 < min((int)(8), (int)(-8 * ko + 30))) {
                *(private float4 *)C_r = fma((float4)(A_s[thread_y + 112]), *(local const float4 *)(B_s + 4 * thread_x + 224), *(private const float4 *)C_r);
            }
        }
    }
    if (thread_x < 8) {
        *(global float4 *)(C + 1024 * io + 32 * jo + 4 * thread_x + 64 * thread_y) = *(private const float4 *)C_r;
    }
}
