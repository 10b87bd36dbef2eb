/* The stable interface of TVM-FFI and of DLPack, as a host that takes errors has it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n%s: %s\n", __FILE__, __LINE__, #condition, kind, message); \
            exit(1); \
        } \
    } while (0)

typedef struct {
    int32_t device_type, device_id;
} DLDevice;
typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct {
    int32_t type_index;
    uint32_t zero_padding;
    union {
        int64_t v_int64;
        void *v_ptr;
    } v;
} TVMFFIAny;
/* An object of reference counts, type and deleter, and then of the tensor. */
typedef struct {
    uint64_t combined_ref_count;
    int32_t type_index;
    uint32_t padding;
    void (*deleter)(void *, int);
    DLTensor tensor;
} TensorObject;

static __thread char kind[64], message[2048];
void TVMFFIErrorSetRaisedFromCStr(const char *of, const char *text);
void TVMFFIErrorSetRaisedFromCStr(const char *of, const char *text) {
    snprintf(kind, sizeof kind, "%s", of);
    snprintf(message, sizeof message, "%s", text);
}
