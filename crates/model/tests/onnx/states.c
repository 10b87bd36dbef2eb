/* Two contexts take turns, the second one with states of the caller's that the first one began; wrong uses give codes
 * and do nothing. Prints what generate.c prints, twice. */
#define _POSIX_C_SOURCE 200112L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"

static float *scores;

static int64_t next(decoder_context *context, int64_t token) {
    if (decoder_run(context, (const void *[]){&token}, (void *[]){scores})) exit(3);
    int64_t best = 0, n = decoder_output(0)->shape[2];
    for (int64_t i = 1; i < n; i++)
        if (scores[i] > scores[best]) best = i;
    return best;
}

int main(int argc, char **argv) {
    decoder_context *first, *second;
    if (argc < 4 || decoder_create(NULL, &first) || decoder_create(NULL, &second)) return 2;
    scores = malloc(decoder_output(0)->bytes);
    int n_new = atoi(argv[1]), n_prompt = argc - 2;
    int64_t tokens[64], last = 0;
    if (n_new > 60) return 2;
    for (int i = 0; i < n_prompt; i++) last = next(first, atoll(argv[2 + i]));
    /* The second context goes on in memory that the first one wrote. */
    size_t n = decoder_states();
    void *memory[16];
    if (n > 16 || decoder_state(n) || decoder_past(first) != n_prompt) return 4;
    for (size_t i = 0; i < n; i++) {
        if (posix_memalign(&memory[i], 64, decoder_state(i)->bytes)) return 5;
        if (decoder_bind_state(first, i, memory[i])) return 5;
    }
    if (decoder_rewind(first, 0)) return 6;
    for (int i = 0; i < n_prompt; i++) last = next(first, atoll(argv[2 + i]));
    if (decoder_bind_state(second, n, memory[0]) != DECODER_BAD_ARGUMENT
        || decoder_bind_state(second, 0, (char *)memory[0] + 4) != DECODER_BAD_ARGUMENT
        || decoder_rewind(first, n_prompt + 1) != DECODER_BAD_SIZE || decoder_rewind(first, -1) != DECODER_BAD_SIZE
        || decoder_rewind(NULL, 0) != DECODER_BAD_ARGUMENT || decoder_past(first) != n_prompt
        || decoder_set_dim(second, 0, decoder_dim(0)->most + 1) != DECODER_BAD_SIZE
        || decoder_dims() != 2 || decoder_dim(2) || decoder_set_dim(first, 2, 1) != DECODER_BAD_SIZE
        || decoder_set_dim(first, 1, 0) != DECODER_BAD_SIZE
        || decoder_set_dim(first, 1, decoder_dim(1)->most + 1) != DECODER_BAD_SIZE)
        return 7;
    next(second, 1);
    for (size_t i = 0; i < n; i++)
        if (decoder_bind_state(second, i, memory[i])) return 8;
    if (decoder_set_dim(second, 0, n_prompt)) return 9;
    for (int i = 0; i < n_new; i++) printf("%lld\n", (long long)(tokens[i] = last)), last = next(second, last);
    /* Back to the end of the prompt, in its own memory again. */
    for (size_t i = 0; i < n; i++)
        if (decoder_bind_state(first, i, NULL)) return 10;
    last = tokens[0];
    for (int i = 0; i < n_new; i++) printf("%lld\n", (long long)last), last = next(first, last);
    decoder_destroy(second);
    decoder_destroy(first);
    for (size_t i = 0; i < n; i++) free(memory[i]);
    free(scores);
    return 0;
}
