/* Three texts, each after inputs of another length: prints thousandths of the results, three tokens at once and then
 * two one by one. Wrong sizes are refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "decoder.h"

int main(void) {
    static const int64_t lengths[] = {5, 40, 1}, numbers[] = {3, 1, 1};
    static float keys[2 * 40 * 4], states[40 * 8], seen[40], y[3 * 8];
    decoder_context *context;
    if (decoder_create(NULL, &context) || decoder_dims() != 3 || decoder_dim(2)->most != 40) return 2;
    for (int text = 0; text < 3; text++) {
        int64_t length = lengths[text], ids[3], shape[4], at = 0;
        for (int64_t i = 0; i < 8 * length; i++) keys[i] = (float)((7 * i + length) % 11) / 8 - 0.5f;
        for (int64_t i = 0; i < 8 * length; i++) states[i] = (float)((5 * i + length) % 13) / 8 - 0.5f;
        for (int64_t i = 0; i < length; i++) seen[i] = i % 4 != 3;
        if (decoder_rewind(context, 0) || decoder_set_dim(context, 2, length)) return 3;
        if (decoder_set_dim(context, 2, 0) != DECODER_BAD_SIZE || decoder_set_dim(context, 2, 41) != DECODER_BAD_SIZE)
            return 4;
        if (decoder_shape(context, 0, 1, shape) || shape[1] != 2 || shape[2] != length) return 5;
        for (int run = 0; run < 3; run++) {
            for (int64_t i = 0; i < numbers[run]; i++, at++) ids[i] = (3 * at + length) % 37;
            if (decoder_set_dim(context, 1, numbers[run])) return 6;
            if (decoder_run(context, (const void *[]){ids, keys, states, seen}, (void *[]){y})) return 7;
            for (int64_t i = 0; i < 8 * numbers[run]; i++) printf("%ld\n", lrintf(1000 * y[i]));
        }
    }
    decoder_destroy(context);
    return 0;
}
