@ORIGIN@
#include "net.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NET_OF_THREAD static __thread
#define NET_FORMAT(text) __attribute__((format(printf, text, (text) + 1)))

#define NET_PROCESS ((uint32_t)getpid())

@COMMON@

#ifdef NET_OLD_GLIBC
__asm__(".symver dlopen, dlopen@" NET_GLIBC);
__asm__(".symver dlsym, dlsym@" NET_GLIBC);
__asm__(".symver dlerror, dlerror@" NET_GLIBC);
#endif

/* A piece of the device's memory that a context has. */
typedef struct net_memory {
    size_t bytes;
    /* Where its contents begin in net_constants; NET_NOTHING where it has none. */
    size_t contents;
    /* Whether runs need it, rather than what is made for them alone. */
    uint32_t in_runs;
} net_memory;

/* Bytes next to each other in a piece of memory. Inputs and then outputs have numbers behind the context's own. */
typedef struct net_span {
    uint32_t memory;
    size_t offset, bytes;
} net_span;

/* Kernels that are built together. */
typedef struct net_code {
    /* The source that the driver builds. */
    const char *text;
    /* Where machine code begins in net_constants; NET_NOTHING where there is none. */
    size_t machine_code;
} net_code;

typedef struct net_kernel {
    uint32_t code;
    const char *name;
    /* Threads of a group, and bytes that they share. */
    uint32_t threads[3];
    uint32_t shared_bytes;
} net_kernel;

/* What instructions that copy boxes are told of an array, innermost dimension first. */
typedef struct net_map {
    /* Which argument of its kernel the array is. */
    uint32_t argument;
    uint32_t kind, rank, swizzled;
    uint64_t extents[5], strides[5];
    uint32_t boxes[5];
} net_map;

typedef struct net_launch {
    uint32_t kernel;
    uint32_t groups[3];
    /* Its arguments in net_arguments, and what it is told of arrays in net_maps. */
    uint32_t first, n;
    uint32_t first_map, n_maps;
    /* The step that it belongs to. */
    const char *step;
} net_launch;

#define NET_NOTHING ((size_t)-1)

/* The tables of this library. */

@TABLES@

/* Pieces of memory: the context's own, inputs, outputs. */
#define NET_PIECES (NET_MEMORIES + NET_INPUTS + NET_OUTPUTS)

/* What failed last, for people. */
NET_OF_THREAD char net_said[1024];
NET_OF_THREAD int net_said_of;

/* A code, with what net_message says of it. */
NET_FORMAT(2) static int net_fail(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(net_said, sizeof net_said, format, values);
    va_end(values);
    for (char *c = net_said; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';
    net_said_of = code;
    return code;
}

/* Launches what a run is on what is passed. */
static int net_put_run(net_context *context, void *queue);

@DRIVER@

/* Contexts. */

NET_API const char *net_message(int code) {
    if (code && code == net_said_of) return net_said;
    switch (code) {
    case NET_OK: return "no error";
    case NET_BAD_ARGUMENT: return "a pointer is null, or memory of the device is too small or not aligned";
    case NET_NO_MEMORY: return "memory does not suffice";
    case NET_NO_DEVICE: return "there is no such device, or no driver of it";
    case NET_DEVICE_FAILED: return "the device or its driver failed";
    case NET_BUSY: return "the context runs in another thread";
    default: return "no such code";
    }
}

NET_API size_t net_arena_bytes(void) {
    size_t bytes = 0;
    for (size_t i = 0; i != NET_MEMORIES; i++)
        if (net_memories[i].in_runs) bytes += net_memories[i].bytes;
    return bytes;
}

/* Builds kernels, takes constants to the device, and makes there what kernels keep of them. */
static int net_prepare(net_context *context) {
    int code = NET_OK;
    for (size_t i = 0; i != NET_CODES && !code; i++) code = net_load(context, i);
    for (size_t i = 0; i != NET_KERNELS && !code; i++) code = net_find(context, i);
    for (size_t i = 0; i != NET_MEMORIES && !code; i++) {
        const net_memory *memory = &net_memories[i];
        code = net_allocate(context, &context->pieces[i], memory->bytes);
        if (!code && memory->contents != NET_NOTHING)
            code = net_write(context, context->pieces[i], net_constants_at + memory->contents, memory->bytes);
    }
    if (!code) code = net_place(context, 0, NET_OWN_SPANS);
    if (!code) code = net_put(context, context->queue, 0, NET_PREPARATIONS);
    int finished = net_finish(context);
    if (!code) code = finished;
    /* What constants were made of is gone. */
    for (size_t i = 0; i != NET_OWN_SPANS && !code; i++)
        if (!net_memories[net_spans[i].memory].in_runs) net_displace(context, i, i + 1);
    for (size_t i = 0; i != NET_MEMORIES && !code; i++)
        if (!net_memories[i].in_runs) net_release(context, &context->pieces[i]);
    return code;
}

NET_API int net_create(const net_options *given, net_context **out) {
    net_options options;
    memset(&options, 0, sizeof options);
    if (given) {
        size_t known = given->struct_size < sizeof options ? given->struct_size : sizeof options;
        memcpy(&options, given, known);
    }
    net_said_of = NET_OK;
    if (!out) return NET_BAD_ARGUMENT;
    *out = NULL;
    net_context *context = calloc(1, sizeof *context);
    if (!context) return NET_NO_MEMORY;
    int code = net_open(context, &options);
    if (!code) {
        code = net_prepare(context);
        net_leave(context);
    }
    if (code) net_destroy(context);
    else *out = context;
    return code;
}

NET_API void net_destroy(net_context *context) {
    if (!context) return;
    net_begin_last_use(&context->owner);
    if (net_enter(context) == NET_OK) {
        net_displace(context, 0, NET_SPANS);
        for (size_t i = 0; i != NET_MEMORIES; i++) net_release(context, &context->pieces[i]);
        for (size_t i = 0; i != NET_INPUTS + NET_OUTPUTS; i++) net_release(context, &context->staged[i]);
        net_close(context);
    }
    free(context);
}

static int net_put_run(net_context *context, void *queue) {
    int code = net_place(context, NET_OWN_SPANS, NET_SPANS);
    if (!code) code = net_put(context, queue, NET_PREPARATIONS, NET_LAUNCHES);
    net_displace(context, NET_OWN_SPANS, NET_SPANS);
    return code;
}

static int net_has_null(const void *const *inputs, void *const *outputs) {
    if ((NET_INPUTS && !inputs) || (NET_OUTPUTS && !outputs)) return 1;
    for (size_t i = 0; i != NET_INPUTS; i++)
        if (!inputs[i]) return 1;
    for (size_t i = 0; i != NET_OUTPUTS; i++)
        if (!outputs[i]) return 1;
    return 0;
}

/* Memory of the device for what is passed in the host's. */
static int net_stage(net_context *context, size_t i, size_t bytes) {
    int code = context->staged[i] ? NET_OK : net_allocate(context, &context->staged[i], bytes);
    context->pieces[NET_MEMORIES + i] = context->staged[i];
    return code;
}

static int net_run_staged(net_context *context, const void *const *inputs, void *const *outputs) {
    int code = net_enter(context);
    if (code) return code;
    net_handle *pieces = &context->pieces[NET_MEMORIES];
    for (size_t i = 0; i != NET_OUTPUTS && !code; i++)
        code = net_stage(context, NET_INPUTS + i, net_output_table[i].bytes);
    for (size_t i = 0; i != NET_INPUTS && !code; i++) {
        code = net_stage(context, i, net_input_table[i].bytes);
        if (!code) code = net_write(context, pieces[i], inputs[i], net_input_table[i].bytes);
    }
    if (!code) code = net_put_staged_run(context);
    for (size_t i = 0; i != NET_OUTPUTS && !code; i++)
        code = net_read(context, pieces[NET_INPUTS + i], outputs[i], net_output_table[i].bytes);
    /* Whatever failed, nothing of the caller's is in use afterwards. */
    int finished = net_finish(context);
    net_leave(context);
    return code ? code : finished;
}

NET_API int net_run(net_context *context, const void *const *inputs, void *const *outputs) {
    net_said_of = NET_OK;
    if (!context || net_has_null(inputs, outputs)) return NET_BAD_ARGUMENT;
    if (!net_begin_use(&context->owner)) return NET_BUSY;
    int code = net_run_staged(context, inputs, outputs);
    net_end_use(&context->owner);
    return code;
}

static int net_enqueue_passed(net_context *context, void *queue, const void *const *inputs, void *const *outputs) {
    int code = net_enter(context);
    if (code) return code;
    code = net_check_queue(context, queue);
    for (size_t i = 0; i != NET_INPUTS && !code; i++)
        code = net_take(context, NET_MEMORIES + i, inputs[i], &net_input_table[i]);
    for (size_t i = 0; i != NET_OUTPUTS && !code; i++)
        code = net_take(context, NET_MEMORIES + NET_INPUTS + i, outputs[i], &net_output_table[i]);
    if (!code) code = net_put_run(context, queue);
    net_leave(context);
    return code;
}

NET_API int net_enqueue(net_context *context, void *queue, const void *const *inputs, void *const *outputs) {
    net_said_of = NET_OK;
    if (!context || net_has_null(inputs, outputs)) return NET_BAD_ARGUMENT;
    if (!net_begin_use(&context->owner)) return NET_BUSY;
    int code = net_enqueue_passed(context, queue, inputs, outputs);
    net_end_use(&context->owner);
    return code;
}
