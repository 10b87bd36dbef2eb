/* Looks closely at two libraries that are the same but for their names; gives a number where something is wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "layer.h"
#include "other.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

/* Addresses that are aligned to elements and no more. */
static char x_memory[32 * 64 * 4 + 4], bias_memory[48 * 4 + 4];
static char expected[32 * 48 * 4];
static const void *inputs[2];

static void load(const char *path, void *to, size_t bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file && fread(to, 1, bytes, file) == bytes);
    fclose(file);
}

#if !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
/* Allocations of the whole program. */
static int n_allocations;
extern void *__libc_malloc(size_t);
void *malloc(size_t bytes) {
    __atomic_fetch_add(&n_allocations, 1, __ATOMIC_SEQ_CST);
    return __libc_malloc(bytes);
}
#else
static int n_allocations;
#endif

/* How often each context runs, and until when at least. */
enum { N_RUNS = 100 };
static double until;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *run_layer(void *unused) {
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    layer_context *context;
    (void)unused;
    CHECK(layer_create(NULL, &context) == LAYER_OK);
    for (int i = 0; i < N_RUNS || now() < until; i++) {
        memset(y, 0, sizeof y);
        CHECK(layer_run(context, inputs, outputs) == LAYER_OK);
        CHECK(!memcmp(y + 4, expected, sizeof expected));
    }
    layer_destroy(context);
    return NULL;
}

static void *run_other(void *unused) {
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    other_context *context;
    other_options options = {sizeof options, 0, 10, OTHER_OWN_THREADS, NULL, 0};
    (void)unused;
    CHECK(other_create(&options, &context) == OTHER_OK);
    for (int i = 0; i < N_RUNS || now() < until; i++) {
        memset(y, 0, sizeof y);
        CHECK(other_run(context, inputs, outputs) == OTHER_OK);
        CHECK(!memcmp(y + 4, expected, sizeof expected));
    }
    other_destroy(context);
    return NULL;
}

/* A context that several threads are in at the same time: each run has the right answer, or is refused. */
enum { N_SHARED_RUNS = 200 };
static layer_context *shared;
static int n_refused;

static void *run_shared(void *unused) {
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    (void)unused;
    for (int i = 0; i < N_SHARED_RUNS;) {
        memset(y, 0, sizeof y);
        int code = layer_run(shared, inputs, outputs);
        if (code == LAYER_BUSY) {
            __atomic_fetch_add(&n_refused, 1, __ATOMIC_RELAXED);
            sched_yield();
            continue;
        }
        CHECK(code == LAYER_OK && !memcmp(y + 4, expected, sizeof expected));
        i++;
    }
    return NULL;
}

static int is_done;

static void *run_once(void *unused) {
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    (void)unused;
    int code = layer_run(shared, inputs, outputs);
    CHECK(code == LAYER_BUSY || (code == LAYER_OK && !memcmp(y + 4, expected, sizeof expected)));
    __atomic_store_n(&is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void share_a_context(void) {
    pthread_t threads[4];
    CHECK(layer_create(NULL, &shared) == LAYER_OK);
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, run_shared, NULL));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(threads[i], NULL));
    layer_destroy(shared);
    CHECK(strstr(layer_message(LAYER_BUSY), "another thread"));

    /* One that is destroyed while it runs in another thread, as its being busy shows. */
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    for (int i = 0; i < 100; i++) {
        CHECK(layer_create(NULL, &shared) == LAYER_OK);
        is_done = 0;
        CHECK(!pthread_create(&threads[0], NULL, run_once, NULL));
        while (!__atomic_load_n(&is_done, __ATOMIC_ACQUIRE) && layer_run(shared, inputs, outputs) != LAYER_BUSY) {
        }
        layer_destroy(shared);
        CHECK(!pthread_join(threads[0], NULL));
    }
}

static double cpu_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    inputs[0] = x_memory + 4;
    inputs[1] = bias_memory + 4;
    load(argv[1], x_memory + 4, sizeof x_memory - 4);
    load(argv[2], bias_memory + 4, sizeof bias_memory - 4);
    load(argv[3], expected, sizeof expected);

    /* What it says of itself. */
    CHECK(layer_abi() == LAYER_ABI && strstr(layer_build(), "\"name\":\"layer\""));
    CHECK(layer_inputs() == 2 && layer_outputs() == 1 && !layer_input(2) && !layer_output(1));
    const layer_tensor *x = layer_input(0);
    CHECK(x->type_code == 2 && x->type_bits == 32 && x->rank == 2 && x->shape[0] == 32 && x->shape[1] == 64);
    CHECK(x->bytes == 32 * 64 * 4 && layer_output(0)->bytes == sizeof expected);

    /* Memory of the caller's. */
    size_t bytes = layer_arena_bytes();
    char *arena = aligned_alloc(64, (bytes + 127) / 64 * 64);
    memset(arena, 7, (bytes + 127) / 64 * 64);
    layer_context *context;
    layer_options options = {sizeof options, 0, 0, 0, arena, bytes - 1};
    CHECK(layer_create(&options, &context) == LAYER_BAD_ARGUMENT && !context);
    options.arena_bytes = bytes;
    options.arena = arena + 4;
    CHECK(layer_create(&options, &context) == LAYER_BAD_ARGUMENT);
    options.arena = arena;
    CHECK(layer_create(&options, NULL) == LAYER_BAD_ARGUMENT);
    CHECK(layer_create(&options, &context) == LAYER_OK);
    for (size_t i = bytes; i < (bytes + 127) / 64 * 64; i++) CHECK(arena[i] == 7);

    /* Runs, without an allocation. */
    char y[sizeof expected + 4];
    void *outputs[1] = {y + 4};
    int before = n_allocations;
    for (int i = 0; i < 100; i++) CHECK(layer_run(context, inputs, outputs) == LAYER_OK);
    CHECK(n_allocations == before);
    CHECK(!memcmp(y + 4, expected, sizeof expected));
    outputs[0] = y + 1;
    CHECK(layer_run(context, inputs, outputs) == LAYER_BAD_ARGUMENT);
    outputs[0] = NULL;
    CHECK(layer_run(context, inputs, outputs) == LAYER_BAD_ARGUMENT);
    outputs[0] = y + 4;
    CHECK(layer_run(NULL, inputs, outputs) == LAYER_BAD_ARGUMENT);
    CHECK(layer_run(context, NULL, outputs) == LAYER_BAD_ARGUMENT);

    /* Threads that have nothing to do leave the CPUs alone. */
    struct timespec pause = {0, 20 * 1000 * 1000};
    nanosleep(&pause, NULL);
    double used = cpu_seconds();
    pause.tv_nsec = 300 * 1000 * 1000;
    nanosleep(&pause, NULL);
    CHECK(cpu_seconds() - used < 0.01 * 0.3);

    /* Options of an older caller. */
    layer_options old = {8, 1, 0, 0, arena, 0};
    layer_context *second;
    CHECK(layer_create(&old, &second) == LAYER_OK);
    CHECK(layer_run(second, inputs, outputs) == LAYER_OK);
    layer_destroy(second);
    layer_destroy(NULL);

#ifndef NO_FORK
    /* A child has one thread. */
    memset(y, 0, sizeof y);
    pid_t child = fork();
    if (child == 0) {
        CHECK(layer_run(context, inputs, outputs) == LAYER_OK && !memcmp(y + 4, expected, sizeof expected));
        layer_destroy(context);
        run_layer(NULL);
        run_other(NULL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    /* A context that ran when the process forked is free in the child. */
    pthread_t running;
    CHECK(layer_create(NULL, &shared) == LAYER_OK && !pthread_create(&running, NULL, run_shared, NULL));
    for (int i = 0; i < 20; i++) {
        child = fork();
        if (child == 0) {
            CHECK(layer_run(shared, inputs, outputs) == LAYER_OK && !memcmp(y + 4, expected, sizeof expected));
            layer_destroy(shared);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(!pthread_join(running, NULL));
    layer_destroy(shared);
#endif

    share_a_context();

    /* Four contexts of each at the same time, for so many seconds where that is asked for. */
    const char *seconds = getenv("CHECK_SECONDS");
    if (seconds) until = now() + atof(seconds);
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) CHECK(!pthread_create(&threads[i], NULL, i % 2 ? run_other : run_layer, NULL));
    for (int i = 0; i < 8; i++) CHECK(!pthread_join(threads[i], NULL));
    layer_destroy(context);
    free(arena);
    return 0;
}
