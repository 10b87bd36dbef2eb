/* Opens a library, makes a context, and closes the library: the context goes on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "layer.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

static char x[32 * 64 * 4], bias[48 * 4], y[32 * 48 * 4], expected[32 * 48 * 4];

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
    const void *inputs[] = {x, bias};
    void *outputs[] = {y};
    for (int i = 0; i < 3; i++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        CHECK(library);
        int (*create)(const layer_options *, layer_context **);
        int (*run)(layer_context *, const void *const *, void *const *);
        void (*destroy)(layer_context *);
        *(void **)&create = dlsym(library, "layer_create");
        *(void **)&run = dlsym(library, "layer_run");
        *(void **)&destroy = dlsym(library, "layer_destroy");
        layer_context *context;
        CHECK(create(NULL, &context) == LAYER_OK);
        CHECK(!dlclose(library));
        /* Threads fall asleep, and wake with the run. */
        struct timespec pause = {0, 10 * 1000 * 1000};
        nanosleep(&pause, NULL);
        memset(y, 0, sizeof y);
        CHECK(run(context, inputs, outputs) == LAYER_OK && !memcmp(y, expected, sizeof y));
        destroy(context);
    }
    return 0;
}
