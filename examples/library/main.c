/* Runs a library named `layer`: reads its inputs from files of bare elements, and writes its outputs to files.
 *
 *   tilewright compile dense:m=32,n=48,k=64,const=w,epilogue=bias+gelu --name layer --constant w=w.bin -o layer
 *   cc -Ilayer main.c layer/layer.c layer/layer_kernels.a -lm -lpthread -o main
 *   ./main x.bin bias.bin y.bin
 */
#include <stdio.h>
#include <stdlib.h>

#include "layer.h"

static int fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    return 1;
}

int main(int argc, char **argv) {
    size_t n_inputs = layer_inputs(), n_outputs = layer_outputs(), i;
    if (argc != (int)(1 + n_inputs + n_outputs)) return fail("give a file for each input and output");

    layer_context *context;
    int code = layer_create(NULL, &context);
    if (code) return fail(layer_message(code));

    const void **inputs = calloc(n_inputs + 1, sizeof *inputs);
    void **outputs = calloc(n_outputs + 1, sizeof *outputs);
    if (!inputs || !outputs) return fail("no memory");
    for (i = 0; i < n_inputs; i++) {
        size_t bytes = layer_input(i)->bytes;
        void *input = malloc(bytes);
        FILE *file = fopen(argv[1 + i], "rb");
        if (!input || !file || fread(input, 1, bytes, file) != bytes) return fail("an input cannot be read");
        fclose(file);
        inputs[i] = input;
    }
    for (i = 0; i < n_outputs; i++) outputs[i] = malloc(layer_output(i)->bytes);

    code = layer_run(context, inputs, outputs);
    if (code) return fail(layer_message(code));

    for (i = 0; i < n_outputs; i++) {
        size_t bytes = layer_output(i)->bytes;
        FILE *file = fopen(argv[1 + n_inputs + i], "wb");
        if (!file || fwrite(outputs[i], 1, bytes, file) != bytes || fclose(file))
            return fail("an output cannot be written");
    }
    layer_destroy(context);
    return 0;
}
