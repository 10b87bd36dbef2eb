/* All host operators, for runs within this process. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NET_HOST

typedef struct net_runtime {
    void *context;
    void (*parallel_for)(void *context, void (*body)(void *env, int64_t iteration, int64_t thread), void *env,
                         int64_t n);
} net_runtime;

#include "host.h"

#include "scatter.c"
#include "top_k.c"
