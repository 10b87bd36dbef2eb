/* NVIDIA's driver. Handles are pointers, addresses of the device numbers. */

#define NET_CALLS(X) \
    X(cuInit, (unsigned)) \
    X(cuGetErrorName, (int, const char **)) \
    X(cuDeviceGetCount, (int *)) \
    X(cuDeviceGet, (int *, int)) \
    X(cuDeviceGetAttribute, (int *, int, int)) \
    X(cuDevicePrimaryCtxRetain, (void **, int)) \
    X(cuDevicePrimaryCtxRelease_v2, (int)) \
    X(cuCtxPushCurrent_v2, (void *)) \
    X(cuCtxPopCurrent_v2, (void **)) \
    X(cuCtxGetDevice, (int *)) \
    X(cuModuleLoadData, (void **, const void *)) \
    X(cuModuleUnload, (void *)) \
    X(cuModuleGetFunction, (void **, void *, const char *)) \
    X(cuFuncSetAttribute, (void *, int, int)) \
    X(cuMemAlloc_v2, (uint64_t *, size_t)) \
    X(cuMemFree_v2, (uint64_t)) \
    X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *)) \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *)) \
    X(cuStreamCreate, (void **, unsigned)) \
    X(cuStreamDestroy_v2, (void *)) \
    X(cuStreamSynchronize, (void *)) \
    X(cuStreamBeginCapture_v2, (void *, int)) \
    X(cuStreamEndCapture, (void *, void **)) \
    X(cuGraphInstantiateWithFlags, (void **, void *, uint64_t)) \
    X(cuGraphDestroy, (void *)) \
    X(cuGraphLaunch, (void *, void *)) \
    X(cuGraphExecDestroy, (void *)) \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, \
                       void **))

#define NET_FIELD(name, arguments) int(*name) arguments;
typedef struct net_calls {
    NET_CALLS(NET_FIELD)
    /* Drivers before H100 have none. */
    int (*cuTensorMapEncodeTiled)(void *, int, unsigned, uint64_t, const uint64_t *, const uint64_t *,
                                  const uint32_t *, const uint32_t *, int, int, int, int);
} net_calls;

enum {
    NET_CU_OUT_OF_MEMORY = 2,
    NET_CU_NOT_FOUND = 500,
    NET_CU_CAPABILITY_MAJOR = 75,
    NET_CU_CAPABILITY_MINOR = 76,
    NET_CU_FUNCTION_SHARED = 8,
    NET_CU_STREAM_NON_BLOCKING = 1,
    NET_CU_CAPTURE_THREAD_LOCAL = 1
};

typedef uint64_t net_handle;

struct net_context {
    /* Who uses it. */
    uint32_t owner;
    net_calls cu;
    int device;
    void *context, *queue;
    /* Whether the context is the device's primary one, which is given back. */
    int is_primary;
    void *codes[NET_CODES + 1], *kernels[NET_KERNELS + 1];
    net_handle pieces[NET_PIECES + 1], spans[NET_SPANS + 1];
    /* For inputs and outputs in the host's memory. */
    net_handle staged[NET_INPUTS + NET_OUTPUTS + 1];
    /* The launches of a run on these, once there was one. */
    void *graph;
};

/* What an instruction is told of an array, as the driver writes it. */
typedef struct net_encoded {
    unsigned char bytes[128];
} __attribute__((aligned(64))) net_encoded;

/* The code for what a call answers. */
static int net_refuse(const net_calls *cu, int answer, const char *what) {
    const char *name = NULL;
    if (cu->cuGetErrorName(answer, &name) || !name) name = "an error";
    return net_fail(answer == NET_CU_OUT_OF_MEMORY ? NET_NO_MEMORY : NET_DEVICE_FAILED, "%s: %s (%d)", what, name,
                    answer);
}

static int net_find_calls(net_calls *cu) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) library = dlopen("libcuda.so", RTLD_NOW);
    if (!library) return net_fail(NET_NO_DEVICE, "there is no driver of NVIDIA's: %s", dlerror());
    void *found;
#define NET_FIND(name, arguments) \
    found = dlsym(library, #name); \
    if (!found) return net_fail(NET_NO_DEVICE, "the driver is too old: it has no " #name); \
    memcpy(&cu->name, &found, sizeof found);
    NET_CALLS(NET_FIND)
    found = dlsym(library, "cuTensorMapEncodeTiled");
    memcpy(&cu->cuTensorMapEncodeTiled, &found, sizeof found);
    return NET_OK;
}

/* Makes the context that of this thread, until net_leave. */
static int net_enter(net_context *context) {
    int answer = context->context ? context->cu.cuCtxPushCurrent_v2(context->context) : NET_CU_NOT_FOUND;
    if (!answer) return NET_OK;
    return context->context ? net_refuse(&context->cu, answer, "cuCtxPushCurrent") : NET_DEVICE_FAILED;
}

static void net_leave(net_context *context) {
    void *popped;
    (void)context->cu.cuCtxPopCurrent_v2(&popped);
}

static int net_find_device(net_context *context, uint32_t number) {
    const net_calls *cu = &context->cu;
    int n = 0, answer = cu->cuInit(0);
    if (!answer) answer = cu->cuDeviceGetCount(&n);
    if (answer) return net_fail(NET_NO_DEVICE, "there is no CUDA device: the driver answers %d", answer);
    if (number >= (uint32_t)n)
        return net_fail(NET_NO_DEVICE, "there is no CUDA device %u: there are %d", (unsigned)number, n);
    answer = cu->cuDeviceGet(&context->device, (int)number);
    if (!answer) answer = cu->cuDevicePrimaryCtxRetain(&context->context, context->device);
    if (answer) return net_refuse(cu, answer, "cuDevicePrimaryCtxRetain");
    context->is_primary = 1;
    return NET_OK;
}

/* Opens a device and enters its context. */
static int net_open(net_context *context, const net_options *options) {
    const net_calls *cu = &context->cu;
    int code = net_find_calls(&context->cu), answer;
    if (code) return code;
    if (options->device_context) context->context = options->device_context;
    else code = net_find_device(context, options->device);
    if (!code) code = net_enter(context);
    if (code) return code;
    answer = cu->cuCtxGetDevice(&context->device);
    if (!answer) answer = cu->cuStreamCreate(&context->queue, NET_CU_STREAM_NON_BLOCKING);
    if (!answer) return NET_OK;
    net_leave(context);
    return net_refuse(cu, answer, "cuStreamCreate");
}

/* Gives all back that is left, in the context, and leaves that. */
static void net_close(net_context *context) {
    const net_calls *cu = &context->cu;
    for (size_t i = 0; i != NET_CODES; i++)
        if (context->codes[i]) (void)cu->cuModuleUnload(context->codes[i]);
    if (context->graph) (void)cu->cuGraphExecDestroy(context->graph);
    if (context->queue) (void)cu->cuStreamDestroy_v2(context->queue);
    net_leave(context);
    if (context->is_primary) (void)cu->cuDevicePrimaryCtxRelease_v2(context->device);
}

static int net_load(net_context *context, size_t i) {
    const net_calls *cu = &context->cu;
    const net_code *code = &net_codes[i];
    int major = 0, minor = 0;
    int answer = cu->cuDeviceGetAttribute(&major, NET_CU_CAPABILITY_MAJOR, context->device);
    if (!answer) answer = cu->cuDeviceGetAttribute(&minor, NET_CU_CAPABILITY_MINOR, context->device);
    if (answer) return net_refuse(cu, answer, "cuDeviceGetAttribute");
    /* On devices of another kind the driver makes machine code of the text. */
    if (code->machine_code != NET_NOTHING && 10 * major + minor == NET_CAPABILITY &&
        !cu->cuModuleLoadData(&context->codes[i], net_constants_at + code->machine_code))
        return NET_OK;
    answer = cu->cuModuleLoadData(&context->codes[i], code->text);
    if (answer) context->codes[i] = NULL;
    return answer ? net_refuse(cu, answer, "cuModuleLoadData, of code for " NET_DEVICE_NAME) : NET_OK;
}

static int net_find(net_context *context, size_t i) {
    const net_calls *cu = &context->cu;
    const net_kernel *kernel = &net_kernels[i];
    int answer = cu->cuModuleGetFunction(&context->kernels[i], context->codes[kernel->code], kernel->name);
    if (!answer && kernel->shared_bytes)
        answer = cu->cuFuncSetAttribute(context->kernels[i], NET_CU_FUNCTION_SHARED, (int)kernel->shared_bytes);
    return answer ? net_refuse(cu, answer, kernel->name) : NET_OK;
}

static int net_allocate(net_context *context, net_handle *piece, size_t bytes) {
    int answer = context->cu.cuMemAlloc_v2(piece, bytes ? bytes : 1);
    if (answer) *piece = 0;
    return answer ? net_refuse(&context->cu, answer, "cuMemAlloc") : NET_OK;
}

static void net_release(net_context *context, net_handle *piece) {
    if (*piece) (void)context->cu.cuMemFree_v2(*piece);
    *piece = 0;
}

static int net_write(net_context *context, net_handle piece, const void *from, size_t bytes) {
    int answer = bytes ? context->cu.cuMemcpyHtoDAsync_v2(piece, from, bytes, context->queue) : 0;
    return answer ? net_refuse(&context->cu, answer, "cuMemcpyHtoDAsync") : NET_OK;
}

static int net_read(net_context *context, net_handle piece, void *to, size_t bytes) {
    int answer = bytes ? context->cu.cuMemcpyDtoHAsync_v2(to, piece, bytes, context->queue) : 0;
    return answer ? net_refuse(&context->cu, answer, "cuMemcpyDtoHAsync") : NET_OK;
}

static int net_finish(net_context *context) {
    int answer = context->cu.cuStreamSynchronize(context->queue);
    return answer ? net_refuse(&context->cu, answer, "running kernels") : NET_OK;
}

/* Gives spans their addresses in pieces of memory that are there. */
static int net_place(net_context *context, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) context->spans[i] = context->pieces[net_spans[i].memory] + net_spans[i].offset;
    return NET_OK;
}

static void net_displace(net_context *context, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) context->spans[i] = 0;
}

/* What instructions of a launch are told of an array. */
static int net_encode(net_context *context, const net_launch *launch, const net_map *map, net_encoded *to) {
    static const uint32_t ones[5] = {1, 1, 1, 1, 1};
    const net_calls *cu = &context->cu;
    uint64_t address = context->spans[net_arguments[launch->first + map->argument]];
    if (!cu->cuTensorMapEncodeTiled) return NET_CU_NOT_FOUND;
    /* Lines of 128 bytes are swizzled, or nothing is; lines of 256 bytes go to the last cache. */
    return cu->cuTensorMapEncodeTiled(to, (int)map->kind, map->rank, address, map->extents, map->strides, map->boxes,
                                      ones, 0, map->swizzled ? 3 : 0, 3, 0);
}

/* Puts launches into a stream. */
static int net_put(net_context *context, void *stream, size_t from, size_t to) {
    const net_calls *cu = &context->cu;
    for (size_t i = from; i < to; i++) {
        const net_launch *launch = &net_launches[i];
        const net_kernel *kernel = &net_kernels[launch->kernel];
        const uint32_t *g = launch->groups, *t = kernel->threads;
        void *arguments[NET_MOST_ARGUMENTS];
        net_encoded maps[NET_MOST_MAPS + 1];
        int answer = 0;
        for (uint32_t a = 0; a < launch->n; a++) arguments[a] = &context->spans[net_arguments[launch->first + a]];
        for (uint32_t m = 0; m < launch->n_maps && !answer; m++) {
            answer = net_encode(context, launch, &net_maps[launch->first_map + m], &maps[m]);
            arguments[launch->n + m] = &maps[m];
        }
        if (!answer)
            answer = cu->cuLaunchKernel(context->kernels[launch->kernel], g[0], g[1], g[2], t[0], t[1], t[2],
                                        kernel->shared_bytes, stream, arguments, NULL);
        if (answer) return net_refuse(cu, answer, launch->step);
    }
    return NET_OK;
}

/* All streams will do; null is the default one. */
static int net_check_queue(net_context *context, void *stream) {
    (void)context;
    (void)stream;
    return NET_OK;
}

/* Takes an address of the device that the caller passes. */
static int net_take(net_context *context, size_t piece, const void *memory, const net_tensor *tensor) {
    context->pieces[piece] = (uint64_t)(uintptr_t)memory;
    if (context->pieces[piece] % NET_ALIGN)
        return net_fail(NET_BAD_ARGUMENT, "`%s` is not aligned to %u bytes", tensor->name, (unsigned)NET_ALIGN);
    return NET_OK;
}

/* Launches what a run is on memory of the context's own, which stays where it is: all launches as one. */
static int net_put_staged_run(net_context *context) {
    const net_calls *cu = &context->cu;
    int answer = 0;
    if (!context->graph) {
        void *graph = NULL;
        answer = cu->cuStreamBeginCapture_v2(context->queue, NET_CU_CAPTURE_THREAD_LOCAL);
        if (answer) return net_refuse(cu, answer, "cuStreamBeginCapture");
        int code = net_put_run(context, context->queue);
        answer = cu->cuStreamEndCapture(context->queue, &graph);
        if (!code && !answer) answer = cu->cuGraphInstantiateWithFlags(&context->graph, graph, 0);
        if (graph) (void)cu->cuGraphDestroy(graph);
        if (code) return code;
        if (answer) context->graph = NULL;
        if (answer) return net_refuse(cu, answer, "cuGraphInstantiate");
    }
    answer = cu->cuGraphLaunch(context->graph, context->queue);
    return answer ? net_refuse(cu, answer, "cuGraphLaunch") : NET_OK;
}
