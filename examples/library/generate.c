/* Greedy decoding: `generate N ID...` prints the N tokens that follow those that are given. */
#include <stdio.h>
#include <stdlib.h>

#include "decoder.h"

int main(int argc, char **argv) {
    decoder_context *context;
    int code = decoder_create(NULL, &context);
    if (code || argc < 3) {
        fprintf(stderr, "%s\n", code ? decoder_message(code) : "generate N ID...");
        return 1;
    }
    const decoder_tensor *logits = decoder_output(0);
    int64_t vocabulary = logits->shape[logits->rank - 1], token = 0;
    float *scores = malloc(logits->bytes);
    for (int at = 2; at < argc - 1 + atoi(argv[1]); at++) {
        if (at < argc) token = strtoll(argv[at], NULL, 10);
        const void *inputs[] = {&token};
        void *outputs[] = {scores};
        code = decoder_run(context, inputs, outputs);
        if (code) {
            fprintf(stderr, "%lld tokens: %s\n", (long long)decoder_past(context), decoder_message(code));
            return 1;
        }
        token = 0;
        for (int64_t i = 1; i < vocabulary; i++)
            if (scores[i] > scores[token]) token = i;
        if (at + 1 >= argc) printf("%lld\n", (long long)token);
    }
    decoder_destroy(context);
    free(scores);
    return 0;
}
