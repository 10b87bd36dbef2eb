
/* The library as a module of TVM-FFI: a function that takes tensors, the inputs and then the outputs. Nothing of
 * TVM-FFI is linked: these are the structures of its stable interface and of DLPack's, and the function that takes
 * errors is called where the process has it. */

typedef struct net_ffi_value {
    int32_t type;
    uint32_t reserved;
    void *pointer;
} net_ffi_value;

typedef struct net_ffi_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t rank;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
} net_ffi_tensor;

/* Types of values, and the bytes of an object in front of its tensor. */
enum { NET_FFI_TENSOR_POINTER = 7, NET_FFI_TENSOR_OBJECT = 70, NET_FFI_OBJECT_BYTES = 24 };
/* Devices whose memory the host reads: CPUs, and the host's memory that drivers of CUDA and of ROCm pin. */
enum { NET_DL_CPU = 1, NET_DL_CUDA_HOST = 3, NET_DL_ROCM_HOST = 11 };

extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) __attribute__((weak));

/* Hands an error over, and is what the function returns then. */
__attribute__((format(printf, 2, 3))) static int net_ffi_refuse(const char *kind, const char *format, ...) {
    char message[1024];
    va_list given;
    va_start(given, format);
    (void)vsnprintf(message, sizeof message, format, given);
    va_end(given);
    if (TVMFFIErrorSetRaisedFromCStr) TVMFFIErrorSetRaisedFromCStr(kind, message);
    return -1;
}

typedef struct net_ffi_text {
    char text[160];
} net_ffi_text;

static net_ffi_text net_ffi_type(uint32_t code, uint32_t bits, uint32_t lanes) {
    static const char *const names[] = {"i", "u", "f", "opaque", "bf", "complex", "bool"};
    net_ffi_text out;
    if (code == 6 && bits == 8 && lanes == 1) (void)snprintf(out.text, sizeof out.text, "bool");
    else if (code < 7 && lanes == 1) (void)snprintf(out.text, sizeof out.text, "%s%u", names[code], bits);
    else (void)snprintf(out.text, sizeof out.text, "type %u of %u bits in %u lanes", code, bits, lanes);
    return out;
}

static net_ffi_text net_ffi_numbers(const int64_t *numbers, int32_t n) {
    net_ffi_text out = {"["};
    size_t at = 1;
    for (int32_t i = 0; i < n && at < sizeof out.text - 32; i++)
        at += (size_t)snprintf(out.text + at, sizeof out.text - at, i ? ", %lld" : "%lld", (long long)numbers[i]);
    (void)snprintf(out.text + at, sizeof out.text - at, "]");
    return out;
}

static int net_ffi_has_shape(const net_ffi_tensor *given, const net_tensor *wanted) {
    if (given->rank != wanted->rank) return 0;
    for (int32_t i = 0; i < wanted->rank; i++)
        if (given->shape[i] != wanted->shape[i]) return 0;
    return 1;
}

/* Whether elements lie next to each other, row-major; a stride that is never walked along says nothing. */
static int net_ffi_is_packed(const net_ffi_tensor *given) {
    int64_t stride = 1;
    if (!given->strides) return 1;
    for (int32_t i = given->rank - 1; i >= 0; i--) {
        if (given->shape[i] != 1 && given->strides[i] != stride) return 0;
        stride *= given->shape[i];
    }
    return 1;
}

/* The address of an argument that was checked. */
static int net_ffi_take(const net_ffi_value *value, const net_tensor *wanted, size_t at, char **address) {
    const net_ffi_tensor *given = value->pointer;
    const char *name = wanted->name;
    if (value->type == NET_FFI_TENSOR_OBJECT) given = (const void *)((char *)value->pointer + NET_FFI_OBJECT_BYTES);
    else if (value->type != NET_FFI_TENSOR_POINTER) given = NULL;
    if (!value->pointer || !given)
        return net_ffi_refuse("TypeError", "@NAME@: argument %zu, `%s`, takes a tensor, not a value of type %d", at,
                              name, (int)value->type);
    if (given->type_code != wanted->type_code || given->type_bits != wanted->type_bits || given->type_lanes != 1) {
        net_ffi_text type = net_ffi_type(wanted->type_code, wanted->type_bits, 1);
        net_ffi_text found = net_ffi_type(given->type_code, given->type_bits, given->type_lanes);
        return net_ffi_refuse("TypeError", "@NAME@: argument %zu, `%s`, takes %s, not %s", at, name, type.text,
                              found.text);
    }
    if (!net_ffi_has_shape(given, wanted)) {
        net_ffi_text shape = net_ffi_numbers(wanted->shape, wanted->rank);
        net_ffi_text found = net_ffi_numbers(given->shape, given->rank);
        return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, takes the shape %s, not %s", at, name,
                              shape.text, found.text);
    }
    if (given->device_type != NET_DL_CPU && given->device_type != NET_DL_CUDA_HOST
        && given->device_type != NET_DL_ROCM_HOST)
        return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, takes the host's memory, not that of device "
                              "%d:%d of DLPack", at, name, (int)given->device_type, (int)given->device_id);
    if (wanted->bytes && !net_ffi_is_packed(given)) {
        net_ffi_text found = net_ffi_numbers(given->strides, given->rank);
        return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, takes contiguous elements, not strides %s "
                              "(make a contiguous copy)", at, name, found.text);
    }
    *address = (char *)given->data + given->byte_offset;
    if (wanted->bytes && !given->data)
        return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, has no memory", at, name);
    /* Nothing of it is read, but functions take no null. */
    if (!wanted->bytes) *address = (char *)(uintptr_t)wanted;
    if ((uintptr_t)*address % (wanted->type_bits / 8))
        return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, takes an address that is a multiple of %d "
                              "bytes (make a copy)", at, name, wanted->type_bits / 8);
    return 0;
}

/* What a call reads and writes: inputs, then outputs. */
static const net_tensor *net_ffi_wanted(size_t at) {
    return at < net_inputs() ? net_input(at) : net_output(at - net_inputs());
}

/* Checks that outputs overlap nothing else. */
static int net_ffi_check_apart(char *const *addresses, size_t n) {
    for (size_t i = net_inputs(); i < n; i++)
        for (size_t j = 0; j < i; j++) {
            const net_tensor *one = net_ffi_wanted(i), *other = net_ffi_wanted(j);
            uintptr_t start = (uintptr_t)addresses[i], from = (uintptr_t)addresses[j];
            if (start < from + other->bytes && from < start + one->bytes)
                return net_ffi_refuse("ValueError", "@NAME@: argument %zu, `%s`, overlaps argument %zu, `%s`, and is "
                                      "written", i, one->name, j, other->name);
        }
    return 0;
}

/* Contexts that no call uses, for later ones; the library stays in memory, and they with it. */
enum { NET_FFI_IDLE = 16 };
static net_context *net_ffi_idle[NET_FFI_IDLE];

static int net_ffi_run(const void *const *inputs, void *const *outputs) {
    net_context *context = NULL;
    int code = NET_OK;
    for (size_t i = 0; i < NET_FFI_IDLE && !context; i++)
        context = __atomic_exchange_n(&net_ffi_idle[i], NULL, __ATOMIC_ACQUIRE);
    if (!context) code = net_create(NULL, &context);
    if (code == NET_OK) code = net_run(context, inputs, outputs);
    /* Before another function is called, which might have a message of its own. */
    if (code != NET_OK)
        (void)net_ffi_refuse(code == NET_NO_MEMORY ? "MemoryError" : "RuntimeError", "@NAME@: %s", net_message(code));
    for (size_t i = 0; i < NET_FFI_IDLE && context; i++) {
        net_context *none = NULL;
        if (__atomic_compare_exchange_n(&net_ffi_idle[i], &none, context, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            context = NULL;
    }
    net_destroy(context);
    return code == NET_OK ? 0 : -1;
}

NET_API int __tvm_ffi_@NAME@(void *self, const net_ffi_value *values, int32_t n, net_ffi_value *result);
NET_API int __tvm_ffi_@NAME@(void *self, const net_ffi_value *values, int32_t n, net_ffi_value *result) {
    static const net_ffi_value none;
    char *addresses[NET_INPUTS + NET_OUTPUTS + 1];
    size_t n_wanted = net_inputs() + net_outputs();
    (void)self;
    if (n < 0 || (size_t)n != n_wanted)
        return net_ffi_refuse("TypeError", "@NAME@ takes %zu tensors, %zu inputs and %zu outputs, not %d arguments",
                              n_wanted, net_inputs(), net_outputs(), (int)n);
    for (size_t i = 0; i < n_wanted; i++)
        if (net_ffi_take(&values[i], net_ffi_wanted(i), i, &addresses[i])) return -1;
    if (net_ffi_check_apart(addresses, n_wanted)) return -1;
    if (result) *result = none;
    return net_ffi_run((const void *const *)addresses, (void *const *)(addresses + NET_INPUTS));
}
