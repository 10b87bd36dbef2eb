/* OpenCL. Handles are pointers, and numbers those of its specification. */

#define NET_CALLS(X) \
    X(int32_t, clGetPlatformIDs, (uint32_t, void **, uint32_t *)) \
    X(int32_t, clGetDeviceIDs, (void *, uint64_t, uint32_t, void **, uint32_t *)) \
    X(int32_t, clGetDeviceInfo, (void *, uint32_t, size_t, void *, size_t *)) \
    X(void *, clCreateContext, (const intptr_t *, uint32_t, void *const *, void *, void *, int32_t *)) \
    X(int32_t, clGetContextInfo, (void *, uint32_t, size_t, void *, size_t *)) \
    X(int32_t, clRetainContext, (void *)) \
    X(int32_t, clReleaseContext, (void *)) \
    X(void *, clCreateCommandQueue, (void *, void *, uint64_t, int32_t *)) \
    X(int32_t, clGetCommandQueueInfo, (void *, uint32_t, size_t, void *, size_t *)) \
    X(int32_t, clReleaseCommandQueue, (void *)) \
    X(void *, clCreateProgramWithSource, (void *, uint32_t, const char **, const size_t *, int32_t *)) \
    X(int32_t, clBuildProgram, (void *, uint32_t, void *const *, const char *, void *, void *)) \
    X(int32_t, clGetProgramBuildInfo, (void *, void *, uint32_t, size_t, void *, size_t *)) \
    X(int32_t, clReleaseProgram, (void *)) \
    X(void *, clCreateKernel, (void *, const char *, int32_t *)) \
    X(int32_t, clGetKernelWorkGroupInfo, (void *, void *, uint32_t, size_t, void *, size_t *)) \
    X(int32_t, clSetKernelArg, (void *, uint32_t, size_t, const void *)) \
    X(int32_t, clReleaseKernel, (void *)) \
    X(void *, clCreateBuffer, (void *, uint64_t, size_t, void *, int32_t *)) \
    X(void *, clCreateSubBuffer, (void *, uint64_t, uint32_t, const void *, int32_t *)) \
    X(int32_t, clGetMemObjectInfo, (void *, uint32_t, size_t, void *, size_t *)) \
    X(int32_t, clReleaseMemObject, (void *)) \
    X(int32_t, clEnqueueWriteBuffer, \
      (void *, void *, uint32_t, size_t, size_t, const void *, uint32_t, void *const *, void **)) \
    X(int32_t, clEnqueueReadBuffer, \
      (void *, void *, uint32_t, size_t, size_t, void *, uint32_t, void *const *, void **)) \
    X(int32_t, clEnqueueNDRangeKernel, \
      (void *, void *, uint32_t, const size_t *, const size_t *, const size_t *, uint32_t, void *const *, void **)) \
    X(int32_t, clFinish, (void *))

#define NET_FIELD(type, name, arguments) type(*name) arguments;
typedef struct net_calls {
    NET_CALLS(NET_FIELD)
} net_calls;

enum {
    NET_CL_DEVICE_MEM_BASE_ADDR_ALIGN = 0x1019,
    NET_CL_DEVICE_LOCAL_MEM_SIZE = 0x1023,
    NET_CL_DEVICE_NAME = 0x102B,
    NET_CL_CONTEXT_DEVICES = 0x1081,
    NET_CL_QUEUE_CONTEXT = 0x1090,
    NET_CL_QUEUE_DEVICE = 0x1091,
    NET_CL_QUEUE_PROPERTIES = 0x1093,
    NET_CL_MEM_SIZE = 0x1102,
    NET_CL_MEM_CONTEXT = 0x1106,
    NET_CL_MEM_ASSOCIATED_MEMOBJECT = 0x1107,
    NET_CL_MEM_OFFSET = 0x1108,
    NET_CL_PROGRAM_BUILD_LOG = 0x1183,
    NET_CL_KERNEL_WORK_GROUP_SIZE = 0x11B0,
    NET_CL_BUFFER_CREATE_TYPE_REGION = 0x1220,
    NET_CL_OUT_OF_ORDER = 1,
    NET_CL_READ_WRITE = 1,
    NET_CL_MEM_OBJECT_ALLOCATION_FAILURE = -4,
    NET_CL_OUT_OF_HOST_MEMORY = -6,
    NET_CL_INVALID_BUFFER_SIZE = -61
};
#define NET_CL_DEVICE_TYPE_ALL 0xFFFFFFFFu

typedef void *net_handle;

struct net_context {
    /* Who uses it. */
    uint32_t owner;
    net_calls cl;
    void *device, *context, *queue;
    void *codes[NET_CODES + 1], *kernels[NET_KERNELS + 1];
    net_handle pieces[NET_PIECES + 1], spans[NET_SPANS + 1];
    /* For inputs and outputs in the host's memory. */
    net_handle staged[NET_INPUTS + NET_OUTPUTS + 1];
};

/* The code for what a call answers. */
static int net_refuse(int32_t answer, const char *what) {
    if (answer == NET_CL_MEM_OBJECT_ALLOCATION_FAILURE || answer == NET_CL_OUT_OF_HOST_MEMORY ||
        answer == NET_CL_INVALID_BUFFER_SIZE)
        return net_fail(NET_NO_MEMORY, "memory does not suffice: %s answers %d", what, (int)answer);
    return net_fail(NET_DEVICE_FAILED, "%s answers %d", what, (int)answer);
}

static int net_find_calls(net_calls *cl) {
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW);
    if (!library) library = dlopen("libOpenCL.so", RTLD_NOW);
    if (!library) return net_fail(NET_NO_DEVICE, "there is no OpenCL loader: %s", dlerror());
    void *found;
#define NET_FIND(type, name, arguments) \
    found = dlsym(library, #name); \
    if (!found) return net_fail(NET_NO_DEVICE, "the OpenCL loader has no " #name); \
    memcpy(&cl->name, &found, sizeof found);
    NET_CALLS(NET_FIND)
    return NET_OK;
}

/* Whether a device has the name of the one that this library was made for: its words, joined. */
static int net_is_alike(const net_calls *cl, void *device) {
    char name[256], words[2 * sizeof name];
    size_t n = 0;
    int is_behind = 0;
    memset(name, 0, sizeof name);
    if (cl->clGetDeviceInfo(device, NET_CL_DEVICE_NAME, sizeof name - 1, name, NULL)) return 0;
    for (const char *c = name; *c; c++) {
        int is_kept = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') ||
                      strchr("._+-", *c) != NULL;
        if (is_kept && is_behind && n) words[n++] = '-';
        if (is_kept) words[n++] = *c;
        is_behind = !is_kept;
    }
    words[n] = 0;
    return !strcmp(words, NET_DEVICE_NAME);
}

/* Finds a device by its number: those like the one that this library was made for come first. */
static int net_look_for_device(net_context *context, uint32_t number) {
    const net_calls *cl = &context->cl;
    void *platforms[32], *devices[64];
    uint32_t n_platforms = 0, n_devices, n = 0;
    int32_t answer = cl->clGetPlatformIDs(32, platforms, &n_platforms);
    if (answer || !n_platforms)
        return net_fail(NET_NO_DEVICE, "no OpenCL device is installed: clGetPlatformIDs answers %d", (int)answer);
    if (n_platforms > 32) n_platforms = 32;
    for (int is_alike = 1; is_alike >= 0; is_alike--)
        for (uint32_t p = 0; p < n_platforms; p++) {
            n_devices = 0;
            if (cl->clGetDeviceIDs(platforms[p], NET_CL_DEVICE_TYPE_ALL, 64, devices, &n_devices)) continue;
            if (n_devices > 64) n_devices = 64;
            for (uint32_t d = 0; d < n_devices; d++)
                if (net_is_alike(cl, devices[d]) == is_alike && n++ == number) {
                    context->device = devices[d];
                    return NET_OK;
                }
        }
    return net_fail(NET_NO_DEVICE, "there is no OpenCL device %u: there are %u", (unsigned)number, (unsigned)n);
}

/* The same, one thread after the other: PoCL gives a second one devices that the first one is still making. */
static int net_find_device(net_context *context, uint32_t number) {
    static uint32_t is_busy;
    while (__atomic_exchange_n(&is_busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
    int code = net_look_for_device(context, number);
    __atomic_store_n(&is_busy, 0, __ATOMIC_RELEASE);
    return code;
}

/* Finds one of the devices of the caller's context. */
static int net_find_device_of_context(net_context *context, uint32_t number) {
    void *devices[64];
    size_t bytes = 0;
    int32_t answer = context->cl.clGetContextInfo(context->context, NET_CL_CONTEXT_DEVICES, sizeof devices, devices,
                                                  &bytes);
    if (answer) return net_refuse(answer, "clGetContextInfo");
    if (number >= bytes / sizeof *devices)
        return net_fail(NET_NO_DEVICE, "the context has no device %u: there are %u", (unsigned)number,
                        (unsigned)(bytes / sizeof *devices));
    context->device = devices[number];
    return NET_OK;
}

static int net_open(net_context *context, const net_options *options) {
    net_calls *cl = &context->cl;
    int32_t answer = 0;
    uint32_t align_bits = 0;
    uint64_t local_bytes = 0, most_shared_bytes = NET_MOST_SHARED_BYTES;
    int code = net_find_calls(cl);
    if (code) return code;
    if (options->device_context) {
        answer = cl->clRetainContext(options->device_context);
        if (answer) return net_refuse(answer, "clRetainContext");
        context->context = options->device_context;
        code = net_find_device_of_context(context, options->device);
    } else {
        code = net_find_device(context, options->device);
        if (!code) context->context = cl->clCreateContext(NULL, 1, &context->device, NULL, NULL, &answer);
        if (answer) return net_refuse(answer, "clCreateContext");
    }
    if (code) return code;
    answer = cl->clGetDeviceInfo(context->device, NET_CL_DEVICE_MEM_BASE_ADDR_ALIGN, sizeof align_bits, &align_bits,
                                 NULL);
    if (!answer)
        answer = cl->clGetDeviceInfo(context->device, NET_CL_DEVICE_LOCAL_MEM_SIZE, sizeof local_bytes, &local_bytes,
                                     NULL);
    if (answer) return net_refuse(answer, "clGetDeviceInfo");
    if (align_bits / 8 > NET_ALIGN)
        return net_fail(NET_DEVICE_FAILED, "the device wants parts of memory aligned to %u bytes, not %u",
                        (unsigned)(align_bits / 8), (unsigned)NET_ALIGN);
    if (local_bytes < most_shared_bytes)
        return net_fail(NET_DEVICE_FAILED, "the device has %u bytes of local memory, kernels take %u",
                        (unsigned)local_bytes, (unsigned)most_shared_bytes);
    context->queue = cl->clCreateCommandQueue(context->context, context->device, 0, &answer);
    return answer ? net_refuse(answer, "clCreateCommandQueue") : NET_OK;
}

static void net_close(net_context *context) {
    const net_calls *cl = &context->cl;
    for (size_t i = 0; i != NET_KERNELS; i++)
        if (context->kernels[i]) cl->clReleaseKernel(context->kernels[i]);
    for (size_t i = 0; i != NET_CODES; i++)
        if (context->codes[i]) cl->clReleaseProgram(context->codes[i]);
    if (context->queue) cl->clReleaseCommandQueue(context->queue);
    if (context->context) cl->clReleaseContext(context->context);
}

/* What belongs to a thread in other drivers. */
static int net_enter(net_context *context) {
    (void)context;
    return NET_OK;
}

static void net_leave(net_context *context) { (void)context; }

static int net_load(net_context *context, size_t i) {
    const net_calls *cl = &context->cl;
    const char *text = net_codes[i].text;
    int32_t answer = 0;
    context->codes[i] = cl->clCreateProgramWithSource(context->context, 1, &text, NULL, &answer);
    if (answer) return net_refuse(answer, "clCreateProgramWithSource");
    answer = cl->clBuildProgram(context->codes[i], 1, &context->device, "", NULL, NULL);
    if (!answer) return NET_OK;
    size_t bytes = 0;
    char *log = NULL;
    if (!cl->clGetProgramBuildInfo(context->codes[i], context->device, NET_CL_PROGRAM_BUILD_LOG, 0, NULL, &bytes))
        log = calloc(1, bytes + 1);
    if (log)
        (void)cl->clGetProgramBuildInfo(context->codes[i], context->device, NET_CL_PROGRAM_BUILD_LOG, bytes, log, NULL);
    int code = net_fail(NET_DEVICE_FAILED, "clBuildProgram answers %d: %s", (int)answer, log ? log : "");
    free(log);
    return code;
}

static int net_find(net_context *context, size_t i) {
    const net_calls *cl = &context->cl;
    const net_kernel *kernel = &net_kernels[i];
    int32_t answer = 0;
    context->kernels[i] = cl->clCreateKernel(context->codes[kernel->code], kernel->name, &answer);
    if (answer) return net_refuse(answer, "clCreateKernel");
    size_t most = 0, n_threads = (size_t)kernel->threads[0] * kernel->threads[1] * kernel->threads[2];
    answer = cl->clGetKernelWorkGroupInfo(context->kernels[i], context->device, NET_CL_KERNEL_WORK_GROUP_SIZE,
                                          sizeof most, &most, NULL);
    if (answer) return net_refuse(answer, "clGetKernelWorkGroupInfo");
    if (n_threads > most)
        return net_fail(NET_DEVICE_FAILED, "a group of kernel %s has %u threads, on this device at most %u", kernel->name,
                        (unsigned)n_threads, (unsigned)most);
    return NET_OK;
}

static int net_allocate(net_context *context, net_handle *piece, size_t bytes) {
    int32_t answer = 0;
    *piece = context->cl.clCreateBuffer(context->context, NET_CL_READ_WRITE, bytes ? bytes : 1, NULL, &answer);
    return answer ? net_refuse(answer, "clCreateBuffer") : NET_OK;
}

static void net_release(net_context *context, net_handle *piece) {
    if (*piece) context->cl.clReleaseMemObject(*piece);
    *piece = NULL;
}

static int net_write(net_context *context, net_handle piece, const void *from, size_t bytes) {
    if (!bytes) return NET_OK;
    int32_t answer = context->cl.clEnqueueWriteBuffer(context->queue, piece, 0, 0, bytes, from, 0, NULL, NULL);
    return answer ? net_refuse(answer, "clEnqueueWriteBuffer") : NET_OK;
}

static int net_read(net_context *context, net_handle piece, void *to, size_t bytes) {
    if (!bytes) return NET_OK;
    int32_t answer = context->cl.clEnqueueReadBuffer(context->queue, piece, 0, 0, bytes, to, 0, NULL, NULL);
    return answer ? net_refuse(answer, "clEnqueueReadBuffer") : NET_OK;
}

static int net_finish(net_context *context) {
    int32_t answer = context->cl.clFinish(context->queue);
    return answer ? net_refuse(answer, "clFinish") : NET_OK;
}

/* Gives spans their places in pieces of memory that are there. */
static int net_place(net_context *context, size_t from, size_t to) {
    const net_calls *cl = &context->cl;
    for (size_t i = from; i < to; i++) {
        const net_span *span = &net_spans[i];
        void *piece = context->pieces[span->memory], *whole = NULL;
        struct { size_t origin, size; } region = {span->offset, span->bytes};
        size_t bytes = 0, offset = 0;
        int32_t answer = cl->clGetMemObjectInfo(piece, NET_CL_MEM_SIZE, sizeof bytes, &bytes, NULL);
        if (!answer && !span->offset && span->bytes == bytes) {
            context->spans[i] = piece;
            continue;
        }
        /* There are no parts of parts: what the caller passes may be one. */
        if (!answer)
            answer = cl->clGetMemObjectInfo(piece, NET_CL_MEM_ASSOCIATED_MEMOBJECT, sizeof whole, &whole, NULL);
        if (!answer && whole)
            answer = cl->clGetMemObjectInfo(piece, NET_CL_MEM_OFFSET, sizeof offset, &offset, NULL);
        region.origin += offset;
        if (!answer)
            context->spans[i] = cl->clCreateSubBuffer(whole ? whole : piece, 0, NET_CL_BUFFER_CREATE_TYPE_REGION, &region,
                                                      &answer);
        if (answer) return net_refuse(answer, "clCreateSubBuffer");
    }
    return NET_OK;
}

static void net_displace(net_context *context, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        if (context->spans[i] && context->spans[i] != context->pieces[net_spans[i].memory])
            context->cl.clReleaseMemObject(context->spans[i]);
        context->spans[i] = NULL;
    }
}

/* Puts launches into a queue. */
static int net_put(net_context *context, void *queue, size_t from, size_t to) {
    const net_calls *cl = &context->cl;
    for (size_t i = from; i < to; i++) {
        const net_launch *launch = &net_launches[i];
        void *kernel = context->kernels[launch->kernel];
        const uint32_t *threads = net_kernels[launch->kernel].threads;
        size_t all[3], group[3];
        int32_t answer = 0;
        for (int axis = 0; axis < 3; axis++) {
            group[axis] = threads[axis];
            all[axis] = (size_t)launch->groups[axis] * threads[axis];
        }
        for (uint32_t a = 0; a < launch->n && !answer; a++)
            answer = cl->clSetKernelArg(kernel, a, sizeof(void *), &context->spans[net_arguments[launch->first + a]]);
        if (!answer) answer = cl->clEnqueueNDRangeKernel(queue, kernel, 3, NULL, all, group, 0, NULL, NULL);
        if (answer) return net_refuse(answer, launch->step);
    }
    return NET_OK;
}

/* A queue of the same context and device, which does one thing after the other. */
static int net_check_queue(net_context *context, void *queue) {
    const net_calls *cl = &context->cl;
    void *of = NULL, *device = NULL;
    uint64_t properties = 0;
    if (!queue) return NET_BAD_ARGUMENT;
    int32_t answer = cl->clGetCommandQueueInfo(queue, NET_CL_QUEUE_CONTEXT, sizeof of, &of, NULL);
    if (!answer) answer = cl->clGetCommandQueueInfo(queue, NET_CL_QUEUE_DEVICE, sizeof device, &device, NULL);
    if (!answer)
        answer = cl->clGetCommandQueueInfo(queue, NET_CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
    if (answer) return net_refuse(answer, "clGetCommandQueueInfo");
    if (of != context->context || device != context->device)
        return net_fail(NET_BAD_ARGUMENT, "the queue is of another context or device");
    if (properties & NET_CL_OUT_OF_ORDER)
        return net_fail(NET_BAD_ARGUMENT, "the queue is out of order, and kernels follow each other");
    return NET_OK;
}

/* Takes a buffer that the caller passes. */
static int net_take(net_context *context, size_t piece, const void *memory, const net_tensor *tensor) {
    void *of = NULL;
    size_t bytes = 0;
    context->pieces[piece] = (void *)memory;
    int32_t answer = context->cl.clGetMemObjectInfo((void *)memory, NET_CL_MEM_SIZE, sizeof bytes, &bytes, NULL);
    if (!answer) answer = context->cl.clGetMemObjectInfo((void *)memory, NET_CL_MEM_CONTEXT, sizeof of, &of, NULL);
    if (answer) return net_refuse(answer, "clGetMemObjectInfo");
    if (of != context->context) return net_fail(NET_BAD_ARGUMENT, "`%s` is of another context", tensor->name);
    if (bytes < tensor->bytes)
        return net_fail(NET_BAD_ARGUMENT, "`%s` has %zu bytes, and takes %zu", tensor->name, bytes, tensor->bytes);
    return NET_OK;
}

/* Launches what a run is on memory of the context's own. */
static int net_put_staged_run(net_context *context) { return net_put_run(context, context->queue); }
