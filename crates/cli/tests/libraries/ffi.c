/* Calls a library `layer` as TVM-FFI does, in whose place this program stands: it hands over values of its stable
 * interface, takes errors, and gives a number where something is wrong. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "tvm_ffi.h"

static int (*layer)(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
static int64_t x_shape[] = {32, 64}, bias_shape[] = {48}, y_shape[] = {32, 48};
static char x[32 * 64 * 4], bias[48 * 4], expected[32 * 48 * 4], memory[32 * 64 * 8];

static DLTensor tensor(void *data, int32_t ndim, int64_t *shape) {
    DLTensor out = {data, {1, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
    return out;
}

/* Arguments of a call; `from` is where they are to be changed. */
typedef struct {
    DLTensor x, bias, y;
    TensorObject object;
    TVMFFIAny values[4];
    char out[sizeof expected];
} Call;

static Call *call(void) {
    Call *c = calloc(1, sizeof *c);
    c->x = tensor(x, 2, x_shape);
    c->bias = tensor(bias, 1, bias_shape);
    c->y = tensor(c->out, 2, y_shape);
    DLTensor *all[] = {&c->x, &c->bias, &c->y};
    for (int i = 0; i < 3; i++) {
        c->values[i].type_index = 7;
        c->values[i].v.v_ptr = all[i];
    }
    return c;
}

static void works(Call *c) {
    TVMFFIAny result = {3, 1, {9}};
    CHECK(layer(NULL, c->values, 3, &result) == 0);
    CHECK(result.type_index == 0 && result.zero_padding == 0 && result.v.v_int64 == 0);
    CHECK(!memcmp(c->out, expected, sizeof expected));
    free(c);
}

/* A call that is refused, by an error of a kind that says these words; nothing is written. */
static void fails(Call *c, int32_t n, const char *of, const char *first, const char *second) {
    TVMFFIAny result = {0, 0, {0}};
    kind[0] = message[0] = 0;
    CHECK(layer(NULL, c->values, n, &result) == -1);
    CHECK(!strcmp(kind, of) && strstr(message, "layer") && strstr(message, first) && strstr(message, second));
    for (size_t i = 0; i < sizeof c->out; i++) CHECK(!c->out[i]);
    free(c);
}

static void check_types(void) {
    Call *c = call();
    fails(c, 2, "TypeError", "3 tensors, 2 inputs and 1 outputs", "not 2 arguments");
    c = call();
    c->values[1].type_index = 3;
    fails(c, 3, "TypeError", "argument 1, `bias`, takes a tensor", "type 3");
    c = call();
    c->values[0].v.v_ptr = NULL;
    fails(c, 3, "TypeError", "argument 0, `X`", "takes a tensor");
    c = call();
    c->x.dtype.bits = 64;
    fails(c, 3, "TypeError", "argument 0, `X`, takes f32", "not f64");
    c = call();
    c->bias.dtype.code = 4;
    c->bias.dtype.bits = 16;
    fails(c, 3, "TypeError", "argument 1, `bias`, takes f32", "not bf16");
    c = call();
    c->y.dtype.lanes = 4;
    fails(c, 3, "TypeError", "argument 2, `Y`", "type 2 of 32 bits in 4 lanes");
    c = call();
    c->y.dtype.code = 250;
    fails(c, 3, "TypeError", "argument 2, `Y`", "type 250");
}

static void check_shapes(void) {
    int64_t other[] = {32, 65}, strides[] = {128, 2}, transposed[] = {1, 32}, walked[] = {64, 1};
    int64_t huge[64];
    for (int i = 0; i < 64; i++) huge[i] = INT64_MIN;
    Call *c = call();
    c->x.shape = other;
    fails(c, 3, "ValueError", "argument 0, `X`, takes the shape [32, 64]", "not [32, 65]");
    c = call();
    c->bias.ndim = 0;
    fails(c, 3, "ValueError", "argument 1, `bias`, takes the shape [48]", "not []");
    c = call();
    c->bias.ndim = 64;
    c->bias.shape = huge;
    fails(c, 3, "ValueError", "argument 1, `bias`", "not [-9223372036854775808, ");
    c = call();
    c->x.strides = strides;
    c->x.data = memory;
    fails(c, 3, "ValueError", "argument 0, `X`, takes contiguous elements", "strides [128, 2]");
    c = call();
    c->x.strides = transposed;
    fails(c, 3, "ValueError", "argument 0, `X`, takes contiguous elements", "strides [1, 32]");
    c = call();
    c->x.strides = walked;
    works(c);
}

static void check_memory(void) {
    for (int device = 0; device < 20; device++) {
        Call *c = call();
        c->x.device.device_type = device;
        /* CPUs, and the host's pinned memory. */
        if (device == 1 || device == 3 || device == 11) works(c);
        else fails(c, 3, "ValueError", "argument 0, `X`, takes the host's memory", "device ");
    }
    Call *c = call();
    c->y.data = NULL;
    fails(c, 3, "ValueError", "argument 2, `Y`", "has no memory");
    c = call();
    c->x.byte_offset = 2;
    fails(c, 3, "ValueError", "argument 0, `X`, takes an address", "multiple of 4 bytes");
    c = call();
    c->x.data = memory + 1;
    memcpy(memory + 12, x, sizeof x);
    c->x.byte_offset = 11;
    works(c);
    c = call();
    c->bias.data = c->out;
    c->bias.byte_offset = 4;
    fails(c, 3, "ValueError", "argument 2, `Y`, overlaps argument 1, `bias`", "is written");
    c = call();
    c->object.tensor = c->x;
    c->values[0].type_index = c->object.type_index = 70;
    c->values[0].v.v_ptr = &c->object;
    works(c);
}

static void *many(void *unused) {
    for (int i = 0; i < 100; i++) works(call());
    check_types();
    return unused;
}

static void load(const char *path, void *to, size_t bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file && fread(to, 1, bytes, file) == bytes);
    fclose(file);
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    load(argv[2], x, sizeof x);
    load(argv[3], bias, sizeof bias);
    load(argv[4], expected, sizeof expected);
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, "__tvm_ffi_layer") : NULL;
    if (!found) fprintf(stderr, "%s\n", dlerror());
    CHECK(found);
    memcpy(&layer, &found, sizeof layer);
    works(call());
    check_types();
    check_shapes();
    check_memory();
    pthread_t threads[20];
    for (int i = 0; i < 20; i++) CHECK(!pthread_create(&threads[i], NULL, many, NULL));
    for (int i = 0; i < 20; i++) CHECK(!pthread_join(threads[i], NULL));
    return 0;
}
