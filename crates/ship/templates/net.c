@ORIGIN@
#define _GNU_SOURCE
#include "net.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Bytes of a large page; the common size on x86-64 and Arm. */
#define NET_LARGE_PAGE ((size_t)2 << 20)

/* The number of forks between the process that loaded the library and this one, and one more. */
static uint32_t net_process = 1;
#define NET_PROCESS net_process

@COMMON@

#ifdef NET_OLD_GLIBC
/* Linked with --wrap for those of libm. */
__asm__(".symver pthread_create, pthread_create@" NET_GLIBC);
__asm__(".symver pthread_join, pthread_join@" NET_GLIBC);
#define NET_OLD(type, name) \
    extern type net_old_##name(type); \
    __asm__(".symver net_old_" #name ", " #name "@" NET_GLIBC); \
    NET_HIDDEN type __wrap_##name(type); \
    NET_HIDDEN type __wrap_##name(type x) { return net_old_##name(x); }
NET_OLD(float, expf)
NET_OLD(float, logf)
NET_OLD(double, exp)
NET_OLD(double, log)
#endif

/* What kernels run parallel loops by. */
typedef struct net_runtime {
    void *context;
    void (*parallel_for)(void *context, void (*body)(void *env, int64_t iteration, int64_t thread), void *env,
                         int64_t n);
} net_runtime;

@NODIM@typedef int (*net_kernel)(void *const *buffers, void *scratch, const net_runtime *runtime);
@DIM@typedef int (*net_kernel)(void *const *buffers, void *scratch, const net_runtime *runtime, const int64_t *sizes);

typedef int (*net_host_operator)(void *const *buffers, void *scratch, const net_runtime *runtime,
                                 const int64_t *parameters);

/* Where an address comes from. */
enum { NET_IN_ARENA, NET_IN_CONSTANTS, NET_IN_MADE, NET_IN_INPUT, NET_IN_OUTPUT, NET_IN_STATE, NET_UNUSED };

typedef struct net_address {
    uint32_t base;
    /* Which input or output. */
    uint32_t index;
    size_t offset;
} net_address;

/* Begins a loop, which goes on behind its end where the truth at its address is 0; ends it, and jumps back. */
enum { NET_LOOP_BEGIN = 2, NET_LOOP_END };

typedef struct net_step {
    /* Where both are null, the second address gets a copy of the first one's bytes; with parameters, of rows: their
     * number and the bytes between them here and there. */
    net_kernel kernel;
    net_host_operator host;
    /* The host operator's; null where they are sizes. */
    const int64_t *parameters;
    /* The step's addresses. */
    uint32_t first;
    /* Whether all threads work on it; or NET_LOOP_BEGIN or NET_LOOP_END. */
    uint32_t all_threads;
    /* Bytes of a copy; where a loop begins or ends, the step at its other end. */
    size_t copied_bytes;
@DIM@    /* The first of the kernel's or the operator's sizes; of a copy, the number of rows of so many bytes, counted from 1, or 0. */
@DIM@    uint32_t size;
    /* Number of the guard without which nobody needs what it does; 0 is none. */
    uint32_t guard;
} net_step;

@DIM@/* (factor * size + term) / divisor, rounded up to a multiple. */
@DIM@typedef struct net_size {
@DIM@    int64_t factor, term, divisor, multiple;
@SECOND@    /* Whether the size is that of the second dimension. */
@SECOND@    int64_t is_of_second;
@DIM@} net_size;
@RANGED@
@PIECES@/* Steps that add a number of rows to states of so many items: a run of more rows is one piece after the other. */
@PIECES@typedef struct net_piece {
@PIECES@    int64_t n_items, n;
@PIECES@    size_t first, end;
@PIECES@} net_piece;
@PIECES@
/* A truth that has to hold, or not to, and another guard beside it. */
typedef struct net_guard {
    uint32_t address, holds, outer;
} net_guard;

/* Constants of f32 that the file has in fewer bits: where they begin there and in memory, in bytes; elements. Levels
 * are u8 behind so many scales and as many least integers, of so many elements next to each other. */
typedef enum net_form { NET_F16, NET_BF16, NET_LEVELS } net_form;
typedef struct net_widened {
    size_t from, to, n, n_scales, n_each;
    net_form form;
} net_widened;

/* The tables of this library. */

@TABLES@

/* Threads. Idle ones spin for a while and then sleep. A loop's iterations are divided among the threads; one that
 * is done takes of the others'. A thread that has no core when a loop begins is not waited for: the loop closes once
 * all iterations are taken. Where a thread loses its core within an iteration, and the loop takes longer than its
 * caller alone would have, the others are left out for a while. */

/* The gate that threads enter a loop by: so many inside, whether it is open, and the loop's number. */
enum { NET_GATE_BITS = 12, NET_GATE_OPEN = 1 << (NET_GATE_BITS - 1) };

/* Least time that a loop lost to others for that to be no chance. They are left out for as long, twice as long
 * whenever it happens again within so many times the time for which they were out, and so long at most. */
enum { NET_LEAST_LOSS_NS = 20000, NET_AGAIN = 4, NET_MOST_OUT_PER_LOSS = 16, NET_LONGEST_OUT_NS = 200000000 };

/* On cache lines that others touch only once they are out of work. */
typedef struct net_share {
    int64_t next, end;
} __attribute__((aligned(128))) net_share;

typedef struct net_pool {
    /* Held while a loop runs: one that finds it so runs on its caller alone. */
    uint32_t is_busy;
    /* Sleeping threads wait for another loop's number. */
    uint32_t gate;
    uint32_t n_asleep, stop;
    uint32_t n_threads, n_users;
    int64_t spin_ns;
    /* Whether others are left out, until when they are or were, how long, and how many times the loss that was. */
    int64_t is_out, out_until_ns, out_ns, out_per_loss;
    void (*body)(void *env, int64_t iteration, int64_t thread);
    void *env;
    pthread_t threads[NET_THREADS];
    net_share shares[NET_THREADS];
} net_pool;

typedef struct net_worker {
    net_pool *pool;
    int64_t thread;
} net_worker;

/* The threads that contexts share. */
static net_pool net_shared;
static net_worker net_shared_workers[NET_THREADS];
static pthread_mutex_t net_shared_lock = PTHREAD_MUTEX_INITIALIZER;

static inline void net_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t net_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Carries out iterations until all are taken; how many of them. */
static int64_t net_work(net_pool *pool, int64_t thread) {
    uint32_t n = pool->n_threads;
    int64_t n_done = 0;
    for (uint32_t i = 0; i < n; i++) {
        net_share *share = &pool->shares[(thread + i) % n];
        int64_t end = __atomic_load_n(&share->end, __ATOMIC_RELAXED);
        for (;;) {
            int64_t iteration = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED);
            if (iteration >= end) break;
            pool->body(pool->env, iteration, thread);
            n_done++;
        }
    }
    return n_done;
}

static uint32_t net_loop_number(const net_pool *pool) {
    return __atomic_load_n(&pool->gate, __ATOMIC_SEQ_CST) >> NET_GATE_BITS;
}

/* Lets a thread into a loop that is open; the number of the last loop. */
static uint32_t net_enter(net_pool *pool, int *is_inside) {
    uint32_t gate = __atomic_load_n(&pool->gate, __ATOMIC_RELAXED);
    do *is_inside = (gate & NET_GATE_OPEN) != 0;
    while (*is_inside
           && !__atomic_compare_exchange_n(&pool->gate, &gate, gate + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED));
    return gate >> NET_GATE_BITS;
}

static void *net_serve(void *of) {
    net_worker *worker = of;
    net_pool *pool = worker->pool;
    uint32_t seen = 0;
    for (;;) {
        int64_t start = net_now();
        for (uint32_t spins = 1; net_loop_number(pool) == seen; spins++) {
            net_pause();
            if (spins % 64 == 0 && net_now() - start > pool->spin_ns) {
                __atomic_fetch_add(&pool->n_asleep, 1, __ATOMIC_SEQ_CST);
                for (;;) {
                    uint32_t gate = __atomic_load_n(&pool->gate, __ATOMIC_SEQ_CST);
                    if (gate >> NET_GATE_BITS != seen) break;
                    syscall(SYS_futex, &pool->gate, FUTEX_WAIT_PRIVATE, gate, NULL, NULL, 0);
                }
                __atomic_fetch_sub(&pool->n_asleep, 1, __ATOMIC_SEQ_CST);
            }
        }
        int is_inside;
        seen = net_enter(pool, &is_inside);
        if (__atomic_load_n(&pool->stop, __ATOMIC_SEQ_CST)) return NULL;
        if (!is_inside) continue;
        net_work(pool, worker->thread);
        __atomic_fetch_sub(&pool->gate, 1, __ATOMIC_RELEASE);
    }
}

/* Begins the next loop, which is open or of no work. */
static void net_begin(net_pool *pool, uint32_t open) {
    uint32_t next = (__atomic_load_n(&pool->gate, __ATOMIC_RELAXED) >> NET_GATE_BITS) + 1;
    __atomic_store_n(&pool->gate, next << NET_GATE_BITS | open, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->n_asleep, __ATOMIC_SEQ_CST) > 0)
        syscall(SYS_futex, &pool->gate, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static int net_has_inside(const net_pool *pool) {
    return (__atomic_load_n(&pool->gate, __ATOMIC_ACQUIRE) & (NET_GATE_OPEN - 1)) != 0;
}

static void net_in_order(void *context, void (*body)(void *, int64_t, int64_t), void *env, int64_t n) {
    (void)context;
    for (int64_t i = 0; i < n; i++) body(env, i, 0);
}

/* Whether others are left out at the moment. */
static int net_leaves_out(net_pool *pool) {
    if (pool->is_out && net_now() >= pool->out_until_ns) pool->is_out = 0;
    return pool->is_out != 0;
}

/* Leaves others out from now on, as a loop took so much longer with them than without. */
static void net_leave_out(net_pool *pool, int64_t now, double lost) {
    int again = pool->out_per_loss && now < pool->out_until_ns + NET_AGAIN * pool->out_ns;
    pool->out_per_loss = !again ? 1 : pool->out_per_loss < NET_MOST_OUT_PER_LOSS ? 2 * pool->out_per_loss
                                                                                 : NET_MOST_OUT_PER_LOSS;
    double out = lost * (double)pool->out_per_loss;
    pool->out_ns = out < NET_LONGEST_OUT_NS ? (int64_t)out : NET_LONGEST_OUT_NS;
    pool->out_until_ns = now + pool->out_ns;
    pool->is_out = 1;
}

/* Runs a loop on all threads of a pool that is busy with it. */
static void net_share_loop(net_pool *pool, int64_t n) {
    int64_t start = net_now(), n_threads = pool->n_threads;
    for (int64_t i = 0; i < n_threads; i++) {
        __atomic_store_n(&pool->shares[i].next, n * i / n_threads, __ATOMIC_RELAXED);
        __atomic_store_n(&pool->shares[i].end, n * (i + 1) / n_threads, __ATOMIC_RELAXED);
    }
    net_begin(pool, NET_GATE_OPEN);
    int64_t n_own = net_work(pool, 0);
    __atomic_fetch_and(&pool->gate, ~(uint32_t)NET_GATE_OPEN, __ATOMIC_RELAXED);
    if (!net_has_inside(pool)) return;
    int64_t own = net_now() - start;
    /* Where there are fewer CPUs than threads, a thread may wait for this one's. */
    for (uint32_t spins = 1; net_has_inside(pool); spins++) {
        if (spins % 4096 == 0) sched_yield();
        else net_pause();
    }
    int64_t now = net_now();
    double lost = n_own ? (double)(now - start) - (double)own * (double)n / (double)n_own : 0;
    if (lost > NET_LEAST_LOSS_NS) net_leave_out(pool, now, lost);
}

static void net_parallel_for(void *context, void (*body)(void *, int64_t, int64_t), void *env, int64_t n) {
    net_pool *pool = context;
    if (n <= 1 || __atomic_exchange_n(&pool->is_busy, 1, __ATOMIC_ACQUIRE)) {
        net_in_order(NULL, body, env, n);
        return;
    }
    if (pool->n_threads <= 1 || net_leaves_out(pool)) {
        net_in_order(NULL, body, env, n);
    } else {
        pool->body = body;
        pool->env = env;
        net_share_loop(pool, n);
    }
    __atomic_store_n(&pool->is_busy, 0, __ATOMIC_RELEASE);
}

static void net_stop(net_pool *pool) {
    __atomic_store_n(&pool->stop, 1, __ATOMIC_SEQ_CST);
    net_begin(pool, 0);
    for (uint32_t i = 1; i < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
}

static int net_start(net_pool *pool, net_worker *workers, uint32_t n_threads, uint32_t spin_us) {
    memset(pool, 0, sizeof *pool);
    pool->spin_ns = (int64_t)spin_us * 1000;
    pool->n_threads = n_threads;
    for (uint32_t i = 1; i < n_threads; i++) {
        workers[i].pool = pool;
        workers[i].thread = i;
        if (pthread_create(&pool->threads[i], NULL, net_serve, &workers[i])) {
            /* No loop has begun: those there are know no number but their own. */
            pool->n_threads = i;
            net_stop(pool);
            return NET_NO_THREADS;
        }
    }
    return NET_OK;
}

/* A child of fork has the thread that forked alone. */

static void net_before_fork(void) { pthread_mutex_lock(&net_shared_lock); }
static void net_after_fork(void) { pthread_mutex_unlock(&net_shared_lock); }
static void net_in_child(void) {
    net_shared.n_threads = net_shared.n_threads ? 1 : 0;
    net_shared.is_busy = 0;
    net_process++;
    pthread_mutex_unlock(&net_shared_lock);
}
__attribute__((constructor)) static void net_watch_forks(void) {
    pthread_atfork(net_before_fork, net_after_fork, net_in_child);
}

/* A shared library that contexts were made in stays when it is closed: threads run in it, and its callers may have
 * contexts still. One that `compile` made is linked so; another one holds itself, where there is a loader. */

#ifndef NET_OLD_GLIBC
#pragma weak dladdr
#pragma weak dlopen
#endif
static void net_stay(void) {
#ifndef NET_OLD_GLIBC
    static uint32_t is_held;
    Dl_info info;
    if (!dladdr || !dlopen || __atomic_exchange_n(&is_held, 1, __ATOMIC_RELAXED)) return;
    if (dladdr(net_build_text, &info) && info.dli_fname) (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
#endif
}

/* Contexts. */

struct net_context {
    /* Who uses it. */
    uint32_t owner;
    net_pool *pool;
    /* Memory to give back. */
    void *own_memory;
    void *scratch;
    pid_t process;
    void *addresses[NET_ADDRESSES + 1];
@PIECES@    int64_t n_rows;
@ITEMS@    int64_t n_items;
@STATE@    char *own_states;
@STATE@    void *states[NET_STATES];
@DIM@    int64_t size;
@SECOND@    int64_t second;
@DIM@    int64_t sizes[NET_SIZES + 1];
@MEMBER@    const net_member *member;
    net_worker workers[NET_THREADS];
    net_pool own_pool;
};

/* What is made of constants, from the first context to the last. */
static char *net_made;
static size_t net_made_users;

static size_t net_rounded(size_t bytes) { return (bytes + 127) / 128 * 128; }

NET_API const char *net_message(int code) {
    switch (code) {
    case NET_OK: return "no error";
    case NET_CPU_UNSUPPORTED: return "the CPU or the operating system lacks a feature that the kernels use";
    case NET_BAD_ARGUMENT: return "a pointer is null or not aligned, or the arena is too small";
    case NET_NO_MEMORY: return "memory does not suffice";
    case NET_NO_THREADS: return "the system refuses a thread";
    case NET_BUSY: return "the context runs in another thread";
    case NET_NO_GRAPH: return "a condition chooses a graph that refuses the sizes of its inputs";
    case NET_BAD_INDEX: return "an index is outside of the tensor that it leads into";
@SIZED@    case NET_BAD_SIZE: return "no dimension has this number, or it has no such size";
@STATE@    case NET_BAD_SIZE: return "states are not so long, or have no room for what a run adds";
    default: return "no such code";
    }
}

NET_API size_t net_arena_bytes(void) {
    /* Up to a line may be lost to its beginning. */
@NOSTATE@    return 128 + net_rounded(sizeof(net_context)) + net_rounded(NET_SCRATCH_BYTES) + net_rounded(NET_TENSOR_BYTES);
@STATE@    return 128 + net_rounded(sizeof(net_context)) + net_rounded(NET_SCRATCH_BYTES) + net_rounded(NET_TENSOR_BYTES)
@STATE@        + net_state_places[NET_STATES];
}

static void *net_allocate(size_t bytes) {
    void *memory;
    size_t align = bytes < NET_LARGE_PAGE ? 128 : NET_LARGE_PAGE;
    if (posix_memalign(&memory, align, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
    /* Advice: nothing is wrong where the system has none of them. */
    if (align == NET_LARGE_PAGE) (void)madvise(memory, bytes / align * align, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Has the system map constants in large pages where it does so of files: what is then read first is there in them. */
static void net_advise_on_constants(void) {
#ifdef MADV_HUGEPAGE
    uintptr_t first = (uintptr_t)net_constants_at, end = first + NET_CONSTANT_BYTES;
    uintptr_t start = (first + NET_LARGE_PAGE - 1) / NET_LARGE_PAGE * NET_LARGE_PAGE;
    if (start < end && end - start >= NET_LARGE_PAGE)
        (void)madvise((void *)start, (end - start) / NET_LARGE_PAGE * NET_LARGE_PAGE, MADV_HUGEPAGE);
#endif
}

/* How loops run that all threads work on. */
static net_runtime net_together(net_context *context) {
    net_runtime alone = {NULL, net_in_order}, together = {context->pool, net_parallel_for};
    /* In a child of fork, threads of its own are gone. */
    int has_threads = context->pool && (context->pool != &context->own_pool || context->process == getpid());
    return has_threads ? together : alone;
}

/* The bits of the f32 with the value of an f16, on CPUs without instructions for that too. */
static inline uint32_t net_wide_bits(uint32_t half) {
    uint32_t exponent = half & 0x7c00, bits = (half & 0x7fff) << 13, least = 113u << 23, small;
    uint32_t normal = bits + (112u << 23) + (exponent == 0x7c00 ? 112u << 23 : 0);
    float sum, one;
    /* A subnormal number is what is left of such a sum, in which nothing is subnormal. */
    small = bits + least;
    memcpy(&sum, &small, 4);
    memcpy(&one, &least, 4);
    sum -= one;
    memcpy(&small, &sum, 4);
    return (half & 0x8000) << 16 | (exponent ? normal : small);
}

static void net_widen_levels(const net_widened *of) {
    const float *scales = (const float *)(const void *)(net_constants_at + of->from), *leasts = scales + of->n_scales;
    const uint8_t *levels = (const uint8_t *)(const void *)(leasts + of->n_scales);
    float *to = (float *)(void *)(net_made + of->to);
    for (size_t first = 0; first != of->n; first += of->n_scales * of->n_each)
        for (size_t at = 0; at != of->n_scales; at++)
            for (size_t i = first + at * of->n_each, end = i + of->n_each; i != end; i++)
                to[i] = ((float)levels[i] + leasts[at]) * scales[at];
}

static void net_widen(void) {
    for (const net_widened *of = net_all_widened; of->n; of++) {
        const uint16_t *from = (const uint16_t *)(const void *)(net_constants_at + of->from);
        uint32_t *to = (uint32_t *)(void *)(net_made + of->to);
        if (of->form == NET_LEVELS)
            net_widen_levels(of);
        else if (of->form == NET_BF16)
            for (size_t i = 0; i < of->n; i++) to[i] = (uint32_t)from[i] << 16;
        else
            for (size_t i = 0; i < of->n; i++) to[i] = net_wide_bits(from[i]);
    }
}

/* Gives the memory back that served to make the rest. */
static void net_give_back(void) {
#ifdef MADV_DONTNEED
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = ((uintptr_t)net_made + NET_KEPT_BYTES + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)net_made + NET_MADE_BYTES) / page * page;
    if (start < end) (void)madvise((void *)start, end - start, MADV_DONTNEED);
#endif
}

/* Has what is made of constants there, which the first context makes. */
static int net_make(net_context *context) {
    int code = NET_OK;
    if (!NET_MADE_BYTES) return code;
    pthread_mutex_lock(&net_shared_lock);
    int is_first = net_made_users == 0;
    if (is_first) net_made = net_allocate(NET_MADE_BYTES);
    if (!net_made) code = NET_NO_MEMORY;
    for (size_t i = 0; code == NET_OK && i != NET_ADDRESSES; i++)
        if (net_addresses[i].base == NET_IN_MADE) context->addresses[i] = net_made + net_addresses[i].offset;
    if (is_first && code == NET_OK) {
        net_runtime together = net_together(context);
        /* What kernels leave out is zero. */
        memset(net_made, 0, NET_MADE_BYTES);
        net_widen();
        for (const net_step *step = net_makers; step->kernel && code == NET_OK; step++)
@NODIM@            code = step->kernel(&context->addresses[step->first], context->scratch, &together);
@DIM@            code = step->kernel(&context->addresses[step->first], context->scratch, &together, context->sizes);
        if (code) free(net_made);
        else net_give_back();
    }
    if (code == NET_OK) net_made_users++;
    pthread_mutex_unlock(&net_shared_lock);
    return code;
}

@DIM@static int64_t net_at(const net_size *of, int64_t size) {
@DIM@    int64_t exact = (of->factor * size + of->term) / of->divisor;
@DIM@    return (exact + of->multiple - 1) / of->multiple * of->multiple;
@DIM@}
@RANGED@
@DIM@static void net_take_size(net_context *context, int64_t size) {
@DIM@    context->size = size;
@DIM@    for (size_t i = 0; i != NET_SIZES; i++) context->sizes[i] = net_at(&net_sizes[i], @SIZE@size);
@DIM@}
@RANGED@
@STATE@static void net_place_state(net_context *context, size_t i, void *memory) {
@STATE@    context->states[i] = memory ? memory : context->own_states + net_state_places[i];
@STATE@    for (size_t at = 0; at != NET_ADDRESSES; at++) {
@STATE@        const net_address *address = &net_addresses[at];
@STATE@        if (address->base == NET_IN_STATE && address->index == i)
@STATE@            context->addresses[at] = (char *)context->states[i] + address->offset;
@STATE@    }
@STATE@}
@STATE@
@STATE@NET_API size_t net_states(void) { return NET_STATES; }
@STATE@NET_API const net_tensor *net_state(size_t i) { return i < NET_STATES ? &net_state_table[i] : NULL; }
@STATE@
@STATE@NET_API int net_bind_state(net_context *context, size_t i, void *memory) {
@STATE@    if (!context || i >= NET_STATES || (uintptr_t)memory % 64) return NET_BAD_ARGUMENT;
@STATE@    if (!net_begin_use(&context->owner)) return NET_BUSY;
@STATE@    net_place_state(context, i, memory);
@STATE@    net_end_use(&context->owner);
@STATE@    return NET_OK;
@STATE@}
@STATE@
@STATE@NET_API int64_t net_past(const net_context *context) { return context ? context->size : 0; }
@STATE@
@STATE@NET_API int net_rewind(net_context *context, int64_t length) {
@STATE@    if (!context) return NET_BAD_ARGUMENT;
@STATE@    if (!net_begin_use(&context->owner)) return NET_BUSY;
@STATE@    int fits = length >= net_the_dimension.least && length <= context->size
@STATE@        && (length - net_the_dimension.least) % net_the_dimension.step == 0;
@STATE@    if (fits) net_take_size(context, length);
@STATE@    net_end_use(&context->owner);
@STATE@    return fits ? NET_OK : NET_BAD_SIZE;
@STATE@}
@STATE@
@RANGED@static const net_dimension *const net_all_dimensions[] = {
@RANGED@    &net_the_dimension,
@ROWS@    &net_of_rows,
@SECOND@    &net_second_dimension,
@PAIR@    &net_of_items,
@RANGED@};
@RANGED@
@RANGED@NET_API size_t net_dims(void) { return sizeof net_all_dimensions / sizeof *net_all_dimensions; }
@RANGED@NET_API const net_dimension *net_dim(size_t i) { return i < net_dims() ? net_all_dimensions[i] : NULL; }
@RANGED@
@RANGED@NET_API int net_set_dim(net_context *context, size_t i, int64_t size) {
@RANGED@    const net_dimension *dim = net_dim(i);
@RANGED@    if (!context) return NET_BAD_ARGUMENT;
@RANGED@    if (!dim || size < dim->least || size > dim->most || (size - dim->least) % dim->step) return NET_BAD_SIZE;
@RANGED@    if (!net_begin_use(&context->owner)) return NET_BUSY;
@RANGED@    if (dim == &net_the_dimension) net_take_size(context, size);
@ROWS@    if (dim == &net_of_rows) context->n_rows = size;
@SECOND@    if (dim == &net_second_dimension) {
@SECOND@        context->second = size;
@SECOND@        net_take_size(context, context->size);
@SECOND@    }
@PAIR@    if (dim == &net_of_items) context->n_items = size;
@SOLE@    context->n_items = size;
@RANGED@    net_end_use(&context->owner);
@RANGED@    return NET_OK;
@RANGED@}
@RANGED@
@RANGED@NET_API int net_shape(const net_context *context, int is_output, size_t i, int64_t *shape) {
@RANGED@    const net_tensor *tensor = is_output ? net_output(i) : net_input(i);
@RANGED@    if (!context || !tensor || !shape) return NET_BAD_ARGUMENT;
@RANGED@    const net_size *open = is_output ? &net_output_sizes[i] : &net_input_sizes[i];
@RANGED@    for (int32_t at = 0; at < tensor->rank; at++)
@ROWS@        shape[at] = tensor->shape[at] < 0 ? net_at(open, @OPEN@context->n_rows) : tensor->shape[at];
@SIZES@        shape[at] = tensor->shape[at] < 0 ? net_at(open, @OPEN@context->size) : tensor->shape[at];
@ITEMS@    if (is_output ? net_output_items[i] : net_input_items[i]) shape[0] = context->n_items;
@RANGED@    return NET_OK;
@RANGED@}
@RANGED@
@MEMBER@NET_API size_t net_dims(void) { return NET_DIMENSIONS; }
@MEMBER@NET_API const net_dimension *net_dim(size_t i) { return i < NET_DIMENSIONS ? &net_all_dimensions[i] : NULL; }
@MEMBER@
@MEMBER@NET_API int net_set_dim(net_context *context, size_t i, int64_t size) {
@MEMBER@    if (!context) return NET_BAD_ARGUMENT;
@MEMBER@    const net_dimension *own = net_dim(i);
@MEMBER@    if (!own || size < own->least || size > own->most || (size - own->least) % own->step) return NET_BAD_SIZE;
@MEMBER@    if (!net_begin_use(&context->owner)) return NET_BUSY;
@MEMBER@    /* Sizes of members fall, those of the last dimension first. */
@MEMBER@    size_t at = 0;
@MEMBER@    for (size_t dim = 0; dim != NET_DIMENSIONS; dim++) {
@MEMBER@        const net_dimension *all = &net_all_dimensions[dim];
@MEMBER@        int64_t taken = dim == i ? size : context->member->sizes[dim];
@MEMBER@        at = at * (size_t)((all->most - all->least) / all->step + 1) + (size_t)((all->most - taken) / all->step);
@MEMBER@    }
@MEMBER@    context->member = &net_members[at];
@OPENED@    net_take_size(context, net_members[at].sizes[NET_OPENED]);
@MEMBER@    net_end_use(&context->owner);
@MEMBER@    return NET_OK;
@MEMBER@}
@MEMBER@
@MEMBER@NET_API int net_shape(const net_context *context, int is_output, size_t i, int64_t *shape) {
@MEMBER@    const net_tensor *tensor = is_output ? net_output(i) : net_input(i);
@MEMBER@    if (!context || !tensor || !shape) return NET_BAD_ARGUMENT;
@MEMBER@    const int64_t *own = net_member_shapes[context->member - net_members];
@MEMBER@    for (size_t at = 0; at != (is_output ? NET_INPUTS : i); at++) own += net_input_table[at].rank;
@MEMBER@    for (size_t at = 0; is_output && at != i; at++) own += net_output_table[at].rank;
@MEMBER@    for (int32_t at = 0; at < tensor->rank; at++) shape[at] = own[at];
@MEMBER@    return NET_OK;
@MEMBER@}
@MEMBER@
static void net_unmake(void) {
    if (!NET_MADE_BYTES) return;
    pthread_mutex_lock(&net_shared_lock);
    if (--net_made_users == 0) free(net_made);
    pthread_mutex_unlock(&net_shared_lock);
}

static void net_leave_threads(net_context *context) {
    if (context->pool == &net_shared) {
        pthread_mutex_lock(&net_shared_lock);
        if (--net_shared.n_users == 0) net_stop(&net_shared);
        pthread_mutex_unlock(&net_shared_lock);
    } else if (context->pool && context->process == getpid()) {
        net_stop(context->pool);
    }
}

NET_API int net_create(const net_options *given, net_context **out) {
    net_options options;
    memset(&options, 0, sizeof options);
    if (given) {
        size_t known = given->struct_size < sizeof options ? given->struct_size : sizeof options;
        memcpy(&options, given, known);
    }
    if (!out) return NET_BAD_ARGUMENT;
    *out = NULL;
    if (!net_supported()) return NET_CPU_UNSUPPORTED;
    void *memory = options.arena, *own = NULL;
    if (memory) {
        if ((uintptr_t)memory % 64 || options.arena_bytes < net_arena_bytes()) return NET_BAD_ARGUMENT;
    } else {
        own = net_allocate(net_arena_bytes());
        if (!own) return NET_NO_MEMORY;
        memory = own;
    }
    net_advise_on_constants();
    net_stay();
    char *start = (char *)net_rounded((size_t)(uintptr_t)memory);
    net_context *context = (net_context *)start;
    char *scratch = start + net_rounded(sizeof(net_context));
    char *tensors = scratch + net_rounded(NET_SCRATCH_BYTES);
    memset(context, 0, sizeof *context);
    context->own_memory = own;
    context->scratch = scratch;
    context->process = getpid();
@SECOND@    context->second = net_second_dimension.most;
@RANGE@    net_take_size(context, net_the_dimension.most);
@MEMBER@    context->member = net_members;
@OPENED@    net_take_size(context, net_members->sizes[NET_OPENED]);
@STATE@    net_take_size(context, net_the_dimension.least);
@PIECES@    context->n_rows = NET_APPENDS;
@ITEMS@    context->n_items = net_of_items.most;
@STATE@    context->own_states = tensors + net_rounded(NET_TENSOR_BYTES);
@STATE@    for (size_t i = 0; i != NET_STATES; i++) net_place_state(context, i, NULL);
    for (size_t i = 0; i != NET_ADDRESSES; i++) {
        const net_address *address = &net_addresses[i];
        if (address->base == NET_IN_ARENA) context->addresses[i] = tensors + address->offset;
        if (address->base == NET_IN_CONSTANTS) context->addresses[i] = (char *)net_constants_at + address->offset;
    }
    uint32_t n_threads = options.threads && options.threads < NET_THREADS ? options.threads : NET_THREADS;
    uint32_t spin_us = options.spin_us ? options.spin_us : 50;
    int code = NET_OK;
    if (n_threads > 1 && options.flags & NET_OWN_THREADS) {
        code = net_start(&context->own_pool, context->workers, n_threads, spin_us);
        context->pool = &context->own_pool;
    } else if (n_threads > 1) {
        pthread_mutex_lock(&net_shared_lock);
        if (net_shared.n_users == 0) code = net_start(&net_shared, net_shared_workers, n_threads, spin_us);
        if (code == NET_OK) net_shared.n_users++;
        pthread_mutex_unlock(&net_shared_lock);
        context->pool = &net_shared;
    }
    if (code == NET_OK) {
        code = net_make(context);
        if (code) net_leave_threads(context);
    }
    if (code == NET_OK) *out = context;
    else free(own);
    return code;
}

static int net_is_needed(const net_context *context, uint32_t guard) {
    while (guard) {
        const net_guard *of = &net_guards[guard - 1];
        if ((*(const unsigned char *)context->addresses[of->address] != 0) != of->holds) return 0;
        guard = of->outer;
    }
    return 1;
}

@ROWS@/* Bytes of an input, or of an output, ahead of a row of what an address is part of. */
@ROWS@static size_t net_bytes_before(const net_context *context, size_t passed, int64_t row) {
@ROWS@    const net_address *address = &net_addresses[net_passed[passed]];
@ROWS@    int is_input = address->base == NET_IN_INPUT;
@ROWS@    const net_tensor *tensor = is_input ? &net_input_table[address->index] : &net_output_table[address->index];
@ROWS@    const net_size *open = is_input ? &net_input_sizes[address->index] : &net_output_sizes[address->index];
@SECONDROWS@    if (open->is_of_second) return 0;
@ROWS@    size_t outer = (is_input ? net_input_outer : net_output_outer)[address->index];
@ROWS@    size_t rows = (size_t)row + net_item_of_passed[passed] * (size_t)context->n_rows;
@ROWS@    return open->factor ? tensor->bytes / outer / (size_t)net_of_rows.most * rows : 0;
@ROWS@}
@ROWS@
@PIECES@/* Makes some rows of outputs of those of inputs that were checked, in a context that is in use. */
@PIECES@static int net_run_steps(net_context *context, const void *const *inputs, void *const *outputs,
@PIECES@                         const net_piece *piece, int64_t row) {
@APART@/* Bytes of an input, or of an output, ahead of an item. */
@APART@static size_t net_bytes_before(const net_context *context, const net_address *address, int64_t item) {
@APART@    int is_input = address->base == NET_IN_INPUT;
@APART@    const net_tensor *tensor = is_input ? &net_input_table[address->index] : &net_output_table[address->index];
@APART@    const net_size *open = is_input ? &net_input_sizes[address->index] : &net_output_sizes[address->index];
@APART@    if (!(is_input ? net_input_items[address->index] : net_output_items[address->index])) return 0;
@APART@    size_t bytes = tensor->type_bits / 8 * (size_t)item;
@APART@    for (int32_t at = 1; at < tensor->rank; at++)
@APART@        bytes *= (size_t)(tensor->shape[at] < 0 ? net_at(open, context->size) : tensor->shape[at]);
@APART@    return bytes;
@APART@}
@APART@
@APART@/* Makes an item of outputs of those of inputs that were checked, in a context that is in use. */
@APART@static int net_run_steps(net_context *context, const void *const *inputs, void *const *outputs, int64_t item) {
@WHOLE@/* Makes outputs of inputs that were checked, in a context that is in use. */
@WHOLE@static int net_run_steps(net_context *context, const void *const *inputs, void *const *outputs) {
    for (size_t i = 0; i != NET_PASSED; i++) {
        const net_address *address = &net_addresses[net_passed[i]];
        char *start = address->base == NET_IN_INPUT ? (char *)inputs[address->index] : outputs[address->index];
@ROWS@        start += net_bytes_before(context, i, row);
@APART@        start += net_bytes_before(context, address, item);
@PARTS@        if (net_start_of_passed[i]) start += context->sizes[net_start_of_passed[i] - 1];
        context->addresses[net_passed[i]] = start + address->offset;
    }
    net_runtime alone = {NULL, net_in_order}, together = net_together(context);
@NOPIECES@    for (size_t i = 0; i != NET_STEPS; i++) {
@MEMBER@    for (size_t i = context->member->first; i != context->member->end; i++) {
@PIECES@    for (size_t i = piece->first; i != piece->end; i++) {
        const net_step *step = &net_steps[i];
        void *const *addresses = &context->addresses[step->first];
        int code = NET_OK;
        int is_needed = net_is_needed(context, step->guard);
        if (step->all_threads == NET_LOOP_BEGIN) {
            if (!is_needed || !*(const uint8_t *)addresses[0]) i = step->copied_bytes;
            continue;
        }
        if (step->all_threads == NET_LOOP_END) {
            i = step->copied_bytes - 1;
            continue;
        }
        if (!is_needed) continue;
        if (step->kernel)
@NODIM@            code = step->kernel(addresses, context->scratch, step->all_threads ? &together : &alone);
@DIM@            code = step->kernel(addresses, context->scratch, step->all_threads ? &together : &alone,
@DIM@                                &context->sizes[step->size]);
        else if (step->host)
@NODIM@            code = step->host(addresses, context->scratch, &alone, step->parameters);
@DIM@            code = step->host(addresses, context->scratch, &alone,
@DIM@                              step->parameters ? step->parameters : &context->sizes[step->size]);
@DIM@        else if (step->parameters)
@DIM@            for (int64_t row = 0; row != step->parameters[0]; row++)
@DIM@                memcpy((char *)addresses[1] + context->sizes[step->size + 1] + row * step->parameters[2],
@DIM@                       (const char *)addresses[0] + context->sizes[step->size] + row * step->parameters[1],
@DIM@                       (size_t)context->sizes[step->size + 2]);
        else
@NODIM@            memmove(addresses[1], addresses[0], step->copied_bytes);
@DIM@            memmove(addresses[1], addresses[0],
@DIM@                    step->copied_bytes * (step->size ? (size_t)context->sizes[step->size - 1] : 1));
        if (code) return code;
    }
    return NET_OK;
}

NET_API int net_run(net_context *context, const void *const *inputs, void *const *outputs) {
    if (!context || (NET_INPUTS && !inputs) || (NET_OUTPUTS && !outputs)) return NET_BAD_ARGUMENT;
    for (size_t i = 0; i != NET_INPUTS; i++)
        if (!inputs[i] || (uintptr_t)inputs[i] % (net_input_table[i].type_bits / 8)) return NET_BAD_ARGUMENT;
    for (size_t i = 0; i != NET_OUTPUTS; i++)
        if (!outputs[i] || (uintptr_t)outputs[i] % (net_output_table[i].type_bits / 8)) return NET_BAD_ARGUMENT;
    if (!net_begin_use(&context->owner)) return NET_BUSY;
@ROWS@    if (context->size + context->n_rows > net_the_dimension.most + NET_APPENDS) {
@ALONE@    if (context->size > net_the_dimension.most) {
@STATE@        net_end_use(&context->owner);
@STATE@        return NET_BAD_SIZE;
@STATE@    }
@WHOLE@    int code = net_run_steps(context, inputs, outputs);
@APART@    int code = NET_OK;
@APART@    for (int64_t item = 0; item != context->n_items && code == NET_OK; item++)
@APART@        code = net_run_steps(context, inputs, outputs, item);
@PIECES@    int code = NET_OK;
@PIECES@    int64_t past = context->size, done = 0;
@PIECES@    for (const net_piece *piece = net_pieces; piece->n && code == NET_OK; piece++) {
@BATCHES@        if (piece->n_items != context->n_items) continue;
@PIECES@        for (; code == NET_OK && context->n_rows - done >= piece->n; done += piece->n) {
@PIECES@            net_take_size(context, past + done);
@PIECES@            code = net_run_steps(context, inputs, outputs, piece, done);
@PIECES@        }
@PIECES@    }
@PIECES@    context->size = code == NET_OK ? past + done : past;
@APPENDS@    if (code == NET_OK) net_take_size(context, context->size + NET_APPENDS);
    net_end_use(&context->owner);
    return code;
}

NET_API void net_destroy(net_context *context) {
    if (!context) return;
    net_begin_last_use(&context->owner);
    net_leave_threads(context);
    net_unmake();
    free(context->own_memory);
}
