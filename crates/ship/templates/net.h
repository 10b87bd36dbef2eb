@ORIGIN@
#ifndef NET_H
#define NET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised where something below changes its meaning. */
#define NET_ABI 1

/* The most threads that run one context, the caller's included. */
#define NET_THREADS @THREADS@

/* What functions return. */
enum {
    NET_OK = 0,
    /* CPU or operating system lack what net_build lists; nothing was done. */
    NET_CPU_UNSUPPORTED = 1,
    /* A null pointer, an address that is not aligned, or an arena that is too small; nothing was done. */
    NET_BAD_ARGUMENT = 2,
    NET_NO_MEMORY = 3,
    NET_NO_THREADS = 4,
    /* Of libraries for GPUs: there is no such device, no driver or no loader. */
    NET_NO_DEVICE = 5,
    /* The same: the device or its driver fails; net_message says what. */
    NET_DEVICE_FAILED = 6,
    /* The context runs in another thread; nothing was done. */
    NET_BUSY = 7,
    /* An index among the inputs leads out of a tensor; the outputs are not made. */
    NET_BAD_INDEX = 8,
@SIZED@    /* No dimension has this number, or it has no such size; nothing was done. */
@STATE@    /* States are not so long, or have no room for what a run adds; nothing was done. */
@DIMS@    NET_BAD_SIZE = 10,
    /* A condition chooses a graph that refuses the sizes of its inputs; the outputs are not made. */
    NET_NO_GRAPH = 9
};

/* A flag of the options: threads of the context's own, instead of those that all contexts share. */
#define NET_OWN_THREADS 1u

/* How a context runs. Zero, but for struct_size, means the default. */
typedef struct net_options {
    /* sizeof(net_options): later versions may add to it. */
    uint32_t struct_size;
@GPU@    /* Of libraries for CPUs: these five say nothing here. */
@GPU@    uint32_t threads, spin_us, flags;
@GPU@    void *arena;
@GPU@    size_t arena_bytes;
@GPU@    /* Which device, from 0 on. Of OpenCL's those that have the name of the one that this was made for come first; of
@GPU@     * the caller's context one of its devices. */
@GPU@    uint32_t device;
@GPU@    uint32_t reserved;
@GPU@    /* A cl_context or CUcontext to work in, until net_destroy; null means a cl_context of its own, or the primary
@GPU@     * context of the device. */
@GPU@    void *device_context;
@CPU@    /* Threads, the caller's included; more than NET_THREADS are not used, 0 means NET_THREADS. Where contexts
@CPU@     * share threads, there are as many as the first one of them asks for. */
@CPU@    uint32_t threads;
@CPU@    /* Microseconds that a thread without work spins before it sleeps; 0 means 50. */
@CPU@    uint32_t spin_us;
@CPU@    uint32_t flags;
@CPU@    /* Memory to use, net_arena_bytes() aligned to 64 bytes, until net_destroy; null means memory of its own. */
@CPU@    void *arena;
@CPU@    size_t arena_bytes;
} net_options;

/* An input or output: row-major, packed, aligned to its elements. */
typedef struct net_tensor {
    const char *name;
    /* As in DLPack: 0 integer, 1 unsigned, 2 float, 4 bfloat, 6 bool. */
    uint8_t type_code;
    /* Bits of an element. */
    uint8_t type_bits;
    uint16_t reserved;
    int32_t rank;
@DIMS@    /* -1 of a dimension of which runs say a size. */
    const int64_t *shape;
@DIMS@    /* At the largest size. */
    size_t bytes;
} net_tensor;
@DIMS@
@DIMS@/* A dimension of which runs say a size. */
@DIMS@typedef struct net_dimension {
@DIMS@    const char *name;
@DIMS@    int64_t least, most, step;
@DIMS@} net_dimension;

typedef struct net_context net_context;

/* NET_ABI as this library was made. */
uint32_t net_abi(void);
/* All about this library, as JSON. */
const char *net_build(void);
@CPU@/* What a code means. */
@GPU@/* What a code means. Of the one that a function gave last in this thread it says what failed, until a function is
@GPU@ * called the next time. */
const char *net_message(int code);

size_t net_inputs(void);
size_t net_outputs(void);
/* Null beyond the last one. */
const net_tensor *net_input(size_t i);
const net_tensor *net_output(size_t i);
@DIMS@
@DIMS@size_t net_dims(void);
@DIMS@/* Null beyond the last one. */
@DIMS@const net_dimension *net_dim(size_t i);

@CPU@/* What a context needs: all of its memory but for the threads'. */
@GPU@/* Bytes of the device's memory that a context has, beside those of inputs and outputs from net_run on. */
size_t net_arena_bytes(void);

@CPU@/* Makes a context. The options may be null. The first one makes what kernels keep of constants and is not in this
@CPU@ * library (`made_bytes` of net_build); all share it, and the last one gives it back. */
@GPU@/* Makes a context: builds its kernels and takes constants to the device. The options may be null. */
int net_create(const net_options *options, net_context **context);
@STATE@/* Tensors that stay between runs, each of which adds to them, as large as they can be. Null beyond the last one. */
@STATE@size_t net_states(void);
@STATE@const net_tensor *net_state(size_t i);
@STATE@/* Has a context keep a state in memory of the caller's, aligned to 64 bytes, as large as the tensor says, until it is
@STATE@ * bound again or net_destroy; null means the context's own. To save states, or to have several texts at a time. */
@STATE@int net_bind_state(net_context *context, size_t i, void *memory);
@STATE@/* How much states have: what runs have added since the last rewind. */
@STATE@int64_t net_past(const net_context *context);
@STATE@/* Forgets what states have beyond a length, 0 for another text. */
@STATE@int net_rewind(net_context *context, int64_t length);
@ALONE@/* Says how much the states have that are bound; runs say so themselves. Allocates nothing. */
@ROWS@/* Says how many rows, such as tokens, the runs that follow add to states: dimension 1, until then the fewest. Or how
@ROWS@ * much the states have that are bound, dimension 0; runs say so themselves. Allocates nothing. */
@SECOND@/* The next dimension is a length of inputs, beside that of states; until it is set it is the largest. */
@SIZED@/* Sets the size of a dimension for the runs of a context that follow; until then it is the largest. Allocates
@SIZED@ * nothing. */
@PAIR@/* The last dimension is the number of items of a run, which the inputs and outputs of that first dimension have. */
@BATCHES@/* Until it is set it is the largest; states of fewer items are the first ones of those of the most. */
@DIMS@int net_set_dim(net_context *context, size_t i, int64_t size);
@DIMS@/* The shape of an input, or of an output, in the next run of a context. */
@DIMS@int net_shape(const net_context *context, int is_output, size_t i, int64_t *shape);
@CPU@/* Makes the outputs of the inputs, in the order above; outputs overlap nothing else. It allocates nothing. A
@CPU@ * context runs once at a time, and says NET_BUSY else; several contexts may run at the same time. */
@GPU@/* Makes the outputs of the inputs, in the order above, all in the host's memory; outputs overlap nothing else. The
@GPU@ * first one takes memory of the device for them. A context runs once at a time, and says NET_BUSY else; several may
@GPU@ * run at the same time. */
int net_run(net_context *context, const void *const *inputs, void *const *outputs);
@GPU@/* Has a device do the same with what lies there, and does not wait. The queue is a cl_command_queue, in order, with
@GPU@ * cl_mems, all of the context's cl_context, or a CUstream with addresses of the device, multiples of 64. What is put
@GPU@ * there next for this context begins when this is over; that is the caller's to see to with several queues. */
@GPU@int net_enqueue(net_context *context, void *queue, const void *const *inputs, void *const *outputs);
/* Ends a context, which nobody uses from then on: waits for a run that is under way in another thread. Null is none. */
void net_destroy(net_context *context);

#ifdef __cplusplus
}
#endif

#endif
