/* Looks closely at a library for OpenCL: devices, contexts of the caller's, data on the device, threads; gives a
 * number where something is wrong. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

/* What of OpenCL is called; numbers are those of its specification. */
int32_t clGetPlatformIDs(uint32_t, void **, uint32_t *);
int32_t clGetDeviceIDs(void *, uint64_t, uint32_t, void **, uint32_t *);
void *clCreateContext(const intptr_t *, uint32_t, void *const *, void *, void *, int32_t *);
void *clCreateCommandQueue(void *, void *, uint64_t, int32_t *);
void *clCreateBuffer(void *, uint64_t, size_t, void *, int32_t *);
void *clCreateSubBuffer(void *, uint64_t, uint32_t, const void *, int32_t *);
int32_t clEnqueueReadBuffer(void *, void *, uint32_t, size_t, size_t, void *, uint32_t, void *const *, void **);
int32_t clReleaseMemObject(void *);
int32_t clReleaseCommandQueue(void *);
int32_t clReleaseContext(void *);
enum { READ_WRITE = 1, READ_ONLY = 4, COPY = 32, OUT_OF_ORDER = 1, REGION = 0x1220 };

static char x[32 * 64 * 4], bias[48 * 4];
static float expected[32 * 48];
static const void *inputs[2] = {x, bias};

static void load(const char *path, void *to, size_t bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file && fread(to, 1, bytes, file) == bytes);
    fclose(file);
}

static void check(const float *y) {
    for (int i = 0; i < 32 * 48; i++) CHECK(fabsf(y[i] - expected[i]) <= 1e-5f * (1 + fabsf(expected[i])));
}

static void *run(void *unused) {
    float y[32 * 48];
    void *outputs[1] = {y};
    layer_context *context;
    (void)unused;
    CHECK(layer_create(NULL, &context) == LAYER_OK);
    for (int i = 0; i < 20; i++) {
        memset(y, 0, sizeof y);
        CHECK(layer_run(context, inputs, outputs) == LAYER_OK);
        check(y);
    }
    layer_destroy(context);
    return NULL;
}

/* A context that several threads are in: each run has the right answer, or is refused. */
static layer_context *shared;

static void *run_shared(void *unused) {
    float y[32 * 48];
    void *outputs[1] = {y};
    (void)unused;
    for (int i = 0; i < 50;) {
        memset(y, 0, sizeof y);
        int code = layer_run(shared, inputs, outputs);
        if (code == LAYER_BUSY) {
            sched_yield();
            continue;
        }
        CHECK(code == LAYER_OK);
        check(y);
        i++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    load(argv[1], x, sizeof x);
    load(argv[2], bias, sizeof bias);
    load(argv[3], expected, sizeof expected);
    CHECK(layer_abi() == LAYER_ABI && layer_inputs() == 2 && layer_outputs() == 1 && !layer_input(2));
    CHECK(layer_arena_bytes() > 0);

    /* Threads, each with a context, of which none has looked for a device before. */
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, run, NULL));
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));

    CHECK(layer_create(NULL, &shared) == LAYER_OK);
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, run_shared, NULL));
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));
    layer_destroy(shared);

    /* What is not there, and what is no argument. */
    layer_context *context;
    layer_options options = {sizeof options, 0, 0, 0, NULL, 0, 1000, 0, NULL};
    CHECK(layer_create(&options, &context) == LAYER_NO_DEVICE && !context);
    CHECK(strstr(layer_message(LAYER_NO_DEVICE), "no OpenCL device 1000"));
    CHECK(layer_create(NULL, NULL) == LAYER_BAD_ARGUMENT);
    CHECK(!strstr(layer_message(LAYER_NO_DEVICE), "1000"));
    CHECK(layer_run(NULL, inputs, NULL) == LAYER_BAD_ARGUMENT);
    layer_destroy(NULL);

    /* Data on the device, in a context of the caller's. */
    void *platform, *device, *ours, *queue;
    int32_t answer;
    CHECK(!clGetPlatformIDs(1, &platform, NULL) && !clGetDeviceIDs(platform, 0xFFFFFFFF, 1, &device, NULL));
    ours = clCreateContext(NULL, 1, &device, NULL, NULL, &answer);
    CHECK(!answer);
    queue = clCreateCommandQueue(ours, device, 0, &answer);
    CHECK(!answer);
    options.device_context = ours;
    CHECK(layer_create(&options, &context) == LAYER_NO_DEVICE);
    options.device = 0;
    CHECK(layer_create(&options, &context) == LAYER_OK);
    /* One is a part of what is larger. */
    char large[4096 + sizeof x + 4096];
    memcpy(large + 4096, x, sizeof x);
    struct { size_t origin, size; } region = {4096, sizeof x};
    void *whole = clCreateBuffer(ours, READ_ONLY | COPY, sizeof large, large, &answer);
    CHECK(!answer);
    void *part = clCreateSubBuffer(whole, READ_ONLY, REGION, &region, &answer);
    CHECK(!answer);
    void *short_one = clCreateBuffer(ours, READ_WRITE, sizeof bias - 4, NULL, &answer);
    CHECK(!answer);
    void *third = clCreateBuffer(ours, READ_ONLY | COPY, sizeof bias, bias, &answer);
    CHECK(!answer);
    void *result = clCreateBuffer(ours, READ_WRITE, sizeof expected + 4, NULL, &answer);
    CHECK(!answer);
    const void *given[2] = {part, third};
    void *made[1] = {result};
    float y[32 * 48];
    for (int i = 0; i < 3; i++) {
        CHECK(layer_enqueue(context, queue, given, made) == LAYER_OK);
        memset(y, 0, sizeof y);
        CHECK(!clEnqueueReadBuffer(queue, result, 1, 0, sizeof y, y, 0, NULL, NULL));
        check(y);
        /* And from the host, in between. */
        void *outputs[1] = {y};
        memset(y, 0, sizeof y);
        CHECK(layer_run(context, inputs, outputs) == LAYER_OK);
        check(y);
    }
    CHECK(layer_enqueue(context, NULL, given, made) == LAYER_BAD_ARGUMENT);
    given[1] = short_one;
    CHECK(layer_enqueue(context, queue, given, made) == LAYER_BAD_ARGUMENT);
    CHECK(strstr(layer_message(LAYER_BAD_ARGUMENT), "has 188 bytes"));
    given[1] = NULL;
    CHECK(layer_enqueue(context, queue, given, made) == LAYER_BAD_ARGUMENT);
    given[1] = third;
    void *other = clCreateCommandQueue(ours, device, OUT_OF_ORDER, &answer);
    if (!answer) {
        CHECK(layer_enqueue(context, other, given, made) == LAYER_BAD_ARGUMENT);
        clReleaseCommandQueue(other);
    }
    layer_destroy(context);
    void *all[] = {part, whole, short_one, third, result};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) CHECK(!clReleaseMemObject(all[i]));
    CHECK(!clReleaseCommandQueue(queue) && !clReleaseContext(ours));
    return 0;
}
