/* All host operators, for runs within this process. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define NET_HOST

typedef struct net_runtime {
    void *context;
    void (*parallel_for)(void *context, void (*body)(void *env, int64_t iteration, int64_t thread), void *env,
                         int64_t n);
} net_runtime;

#include "host.h"

#include "binary.c"
#include "copy.c"
#include "coupling.c"
#include "crop.c"
#include "cumulative.c"
#include "det.c"
#include "iterate.c"
#include "max_pool.c"
#include "mel.c"
#include "put.c"
#include "random.c"
#include "roi_align.c"
#include "scatter.c"
#include "select.c"
#include "take.c"
#include "top_k.c"
#include "unary.c"
