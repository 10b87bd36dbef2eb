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
    int64_t vocabulary = logits->shape[logits->rank - 1], most = decoder_dim(1)->most;
    int64_t n_prompt = argc - 2, n_all = n_prompt + atoi(argv[1]) - 1, token = 0, n;
    int64_t *prompt = malloc((size_t)n_prompt * sizeof *prompt);
    for (int64_t i = 0; i < n_prompt; i++) prompt[i] = strtoll(argv[i + 2], NULL, 10);
    float *scores = malloc(logits->bytes);
    /* As much of the prompt at once as one run takes, then one token after the other. */
    for (int64_t at = 0; at < n_all; at += n) {
        n = at >= n_prompt ? 1 : n_prompt - at < most ? n_prompt - at : most;
        const void *inputs[] = {at < n_prompt ? &prompt[at] : &token};
        void *outputs[] = {scores};
        code = decoder_set_dim(context, 1, n);
        if (!code) code = decoder_run(context, inputs, outputs);
        if (code) {
            fprintf(stderr, "%lld tokens: %s\n", (long long)decoder_past(context), decoder_message(code));
            return 1;
        }
        const float *last = scores + (n - 1) * vocabulary;
        token = 0;
        for (int64_t i = 1; i < vocabulary; i++)
            if (last[i] > last[token]) token = i;
        if (at + n >= n_prompt) printf("%lld\n", (long long)token);
    }
    decoder_destroy(context);
    free(prompt);
    free(scores);
    return 0;
}
