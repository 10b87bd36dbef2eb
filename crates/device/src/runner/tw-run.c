/* tw-run: runs kernels for Tilewright on a machine that has no compiler.
 *
 *     cc -O2 -static -pthread -o tw-run tw-run.c -lm
 *
 * It reads frames from standard input and answers each on standard output: a kind or a status, a number, how
 * many bytes follow, and these; all little-endian. Kernels run in this process, so that their times are those
 * of a program that calls them. What crashes, or takes longer than it may, ends the process once that is
 * answered: whoever started it starts it again. With --emulated it says that its times mean nothing, which it
 * finds out by itself under QEMU.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "machines whose lowest byte comes first are served, others are not"
#endif

#define PROTOCOL 1
/* Address space for the code of one kernel. */
#define CODE_BYTES ((size_t)16 << 20)
#define MOST_BUFFERS 256
#define MOST_THREADS 64
#define MOST_SAMPLES 4096
#define LARGE_PAGE ((size_t)2 << 20)
#define CANARY 0x7F
#define LINE 64

/* What is asked for. */
enum { HELLO = 1, LIMIT, BUFFER, UPLOAD, FILL, DOWNLOAD, CODE, RUN, STATE };
/* What comes of it: in the number is a signal, or what broke. */
enum { DONE = 0, SIGNALLED, LATE, FENCE, NO_MEMORY, MALFORMED };

struct frame { uint32_t what, number; uint64_t n_bytes; };

/* What follows a RUN: where the function is, how it is timed, and its buffers, scratch memory last. */
struct run {
    uint64_t entry, deadline_ns, flush_bytes;
    uint32_t n_warm, n_runs, n_samples, n_threads, n_buffers, unused;
};
/* In the number of a buffer: caches do not hold it when a sample begins. */
#define EVICTED 0x80000000u

struct buffer { char *map, *data; size_t map_bytes, n_bytes; int is_input; };

typedef void body(void *env, int64_t iteration, int64_t thread);
struct runtime { void *context; void (*parallel_for)(void *, body *, void *, int64_t); };
typedef void entry(void **buffers, void *scratch, const struct runtime *runtime);

static struct buffer buffers[MOST_BUFFERS];
static size_t page, used_bytes, most_bytes = SIZE_MAX;
static char *code;
static int cpus[MOST_THREADS];

/* Frames. */

static int read_all(void *to, size_t n) {
    for (char *at = to; n > 0;) {
        ssize_t got = read(0, at, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        at += got;
        n -= (size_t)got;
    }
    return 1;
}

/* May be called in a handler. */
static void write_all(const void *from, size_t n) {
    for (const char *at = from; n > 0;) {
        ssize_t put = write(1, at, n);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) _exit(1);
        at += put;
        n -= (size_t)put;
    }
}

static void answer(uint32_t status, uint32_t number, const void *bytes, size_t n_bytes) {
    struct frame frame = { status, number, n_bytes };
    write_all(&frame, sizeof frame);
    write_all(bytes, n_bytes);
}

static void refuse(const char *why) { answer(MALFORMED, 0, why, strlen(why)); }

/* Signals. */

static void on_signal(int signal) {
    /* Only the first of several threads answers. */
    static int answered;
    if (__atomic_exchange_n(&answered, 1, __ATOMIC_SEQ_CST)) for (;;) pause();
    answer(signal == SIGALRM ? LATE : SIGNALLED, (uint32_t)signal, NULL, 0);
    _exit(3);
}

/* Gives the calling thread a stack for its handlers, as it may have none left of its own. */
static void give_stack(void) {
    stack_t stack;
    memset(&stack, 0, sizeof stack);
    stack.ss_size = 65536;
    stack.ss_sp = malloc(stack.ss_size);
    if (stack.ss_sp) sigaltstack(&stack, NULL);
}

static void catch_signals(void) {
    static const int signals[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGALRM };
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_ONSTACK;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) sigaction(signals[i], &action, NULL);
    give_stack();
}

static void set_deadline(uint64_t ns) {
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    timer.it_value.tv_sec = (time_t)(ns / 1000000000);
    timer.it_value.tv_usec = (suseconds_t)(ns % 1000000000 / 1000);
    if (ns > 0 && ns < 1000) timer.it_value.tv_usec = 1;
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* Threads: each has a part of the iterations, the same in each run. */

static struct {
    body *call;
    void *env;
    int64_t n_iterations;
    uint64_t epoch;
    int n_threads, n_made, n_running;
} pool = { .n_threads = 1, .n_made = 1 };

static void pin(int thread) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpus[thread] < 0) return;
    CPU_SET(cpus[thread], &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void relax(void) {
#if defined __aarch64__
    __asm__ volatile("yield");
#elif defined __x86_64__
    __asm__ volatile("pause");
#endif
}

static void work(int64_t thread) {
    int64_t n = pool.n_iterations, threads = pool.n_threads;
    if (thread >= threads) return;
    for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; i++) pool.call(pool.env, i, thread);
}

static void *serve(void *argument) {
    int64_t thread = (int64_t)(intptr_t)argument;
    uint64_t seen = 0, now;
    give_stack();
    pin((int)thread);
    for (;;) {
        for (unsigned spins = 0; (now = __atomic_load_n(&pool.epoch, __ATOMIC_ACQUIRE)) == seen; spins++) {
            relax();
            if (spins > 20000) usleep(50);
        }
        seen = now;
        work(thread);
        __atomic_fetch_sub(&pool.n_running, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void parallel_for(void *context, body *call, void *env, int64_t n) {
    (void)context;
    if (pool.n_threads == 1 || n < 2) {
        for (int64_t i = 0; i < n; i++) call(env, i, 0);
        return;
    }
    pool.call = call;
    pool.env = env;
    pool.n_iterations = n;
    __atomic_store_n(&pool.n_running, pool.n_made - 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&pool.epoch, 1, __ATOMIC_SEQ_CST);
    work(0);
    while (__atomic_load_n(&pool.n_running, __ATOMIC_ACQUIRE) > 0) relax();
}

static int have_threads(int n) {
    for (; pool.n_made < n; pool.n_made++) {
        pthread_t thread;
        /* One that begins later must not take an earlier loop for its first. */
        if (pool.epoch != 0) return 0;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)pool.n_made)) return 0;
    }
    pool.n_threads = n;
    return 1;
}

/* Buffers: what a kernel may touch lies between bytes that must stay, and these between pages that nobody may
 * touch. */

static size_t whole_pages(size_t n) { return (n + page - 1) / page * page; }

/* Inputs are read only. */
static int protect(struct buffer *b, int protection) {
    return mprotect(b->data, whole_pages(b->n_bytes), protection);
}

static void set_canaries(struct buffer *b) {
    if (b->is_input) protect(b, PROT_READ | PROT_WRITE);
    memset(b->data - page, CANARY, page);
    memset(b->data + b->n_bytes, CANARY, whole_pages(b->n_bytes) - b->n_bytes + page);
    if (b->is_input) protect(b, PROT_READ);
}

static int is_canary(const char *from, size_t n) {
    while (n-- > 0) if (*from++ != CANARY) return 0;
    return 1;
}

static int is_intact(struct buffer *b) {
    return is_canary(b->data - page, page)
        && is_canary(b->data + b->n_bytes, whole_pages(b->n_bytes) - b->n_bytes + page);
}

static void release(struct buffer *b) {
    if (b->map) {
        munmap(b->map, b->map_bytes);
        used_bytes -= b->map_bytes;
    }
    memset(b, 0, sizeof *b);
}

static int make_buffer(struct buffer *b, uint64_t n) {
    release(b);
    size_t align = n < LARGE_PAGE ? page : LARGE_PAGE;
    if (n > SIZE_MAX / 4) return 0;
    size_t inner = whole_pages((size_t)n) + 2 * page, map_bytes = inner + 2 * page + align;
    if (map_bytes > most_bytes || used_bytes > most_bytes - map_bytes) return 0;
    char *map = mmap(NULL, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return 0;
    uintptr_t data = ((uintptr_t)map + 2 * page + align - 1) / align * align;
    b->map = map;
    b->map_bytes = map_bytes;
    b->data = (char *)data;
    b->n_bytes = (size_t)n;
    used_bytes += map_bytes;
    if (mprotect(b->data - page, inner, PROT_READ | PROT_WRITE)) {
        release(b);
        return 0;
    }
#ifdef MADV_HUGEPAGE
    madvise(b->map, map_bytes, MADV_HUGEPAGE);
#endif
    memset(b->data, 0, b->n_bytes);
    set_canaries(b);
    return 1;
}

/* The buffer of a frame; none where there is no such buffer. */
static struct buffer *buffer_of(uint32_t number) {
    return number < MOST_BUFFERS && buffers[number].map ? &buffers[number] : NULL;
}

/* Runs. */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void evict(const char *from, size_t n) {
    for (size_t at = 0; at < n; at += LINE) {
#if defined __aarch64__
        __asm__ volatile("dc civac, %0" : : "r"(from + at) : "memory");
#elif defined __x86_64__
        __asm__ volatile("clflush (%0)" : : "r"(from + at) : "memory");
#endif
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Fills caches with what no kernel needs. */
static void flush(size_t n) {
    static char *other;
    static size_t other_bytes;
    if (n > other_bytes) {
        free(other);
        other = calloc(1, n);
        other_bytes = other ? n : 0;
    }
    for (size_t at = 0; at < other_bytes; at += LINE) ((volatile char *)other)[at]++;
}

static void run(const char *payload, size_t n_bytes) {
    static uint64_t samples[MOST_SAMPLES];
    struct run r;
    void *arguments[MOST_BUFFERS];
    struct runtime runtime = { NULL, parallel_for };
    if (n_bytes < sizeof r) return refuse("a run is cut short");
    memcpy(&r, payload, sizeof r);
    if (r.n_buffers < 1 || r.n_buffers > MOST_BUFFERS || n_bytes != sizeof r + 4 * (size_t)r.n_buffers)
        return refuse("a run has other buffers than it says");
    if (r.n_samples > MOST_SAMPLES || r.n_threads < 1 || r.n_threads > MOST_THREADS || r.entry >= CODE_BYTES)
        return refuse("a run is out of bounds");
    const uint32_t *numbers = (const uint32_t *)(const void *)(payload + sizeof r);
    for (uint32_t i = 0; i < r.n_buffers; i++) {
        struct buffer *b = buffer_of(numbers[i] & ~EVICTED);
        if (!b) return refuse("a run names a buffer that is not there");
        arguments[i] = b->data;
    }
    if (!have_threads((int)r.n_threads)) return answer(NO_MEMORY, 0, NULL, 0);
    entry *call = (entry *)(uintptr_t)(code + r.entry);
    void *scratch = arguments[r.n_buffers - 1];
    set_deadline(r.deadline_ns);
    for (uint32_t i = 0; i < r.n_warm; i++) call(arguments, scratch, &runtime);
    for (uint32_t s = 0; s < r.n_samples; s++) {
        if (r.flush_bytes) flush((size_t)r.flush_bytes);
        for (uint32_t i = 0; i < r.n_buffers; i++)
            if (numbers[i] & EVICTED) evict(arguments[i], buffers[numbers[i] & ~EVICTED].n_bytes);
        uint64_t start = now_ns();
        for (uint32_t i = 0; i < r.n_runs; i++) call(arguments, scratch, &runtime);
        samples[s] = now_ns() - start;
    }
    set_deadline(0);
    int broken = 0;
    for (int i = 0; i < MOST_BUFFERS; i++)
        if (buffers[i].map && !is_intact(&buffers[i])) {
            broken = 1;
            set_canaries(&buffers[i]);
        }
    if (broken) return answer(FENCE, 0, NULL, 0);
    answer(DONE, 0, samples, r.n_samples * sizeof *samples);
}

/* Takes code over, which begins with its executable bytes: how many is said first. */
static void load(const char *payload, size_t n_bytes) {
    uint64_t n_executable;
    if (n_bytes < 8 || n_bytes - 8 > CODE_BYTES) return refuse("the code is too long");
    memcpy(&n_executable, payload, 8);
    n_bytes -= 8;
    if (n_executable > n_bytes || n_executable % page) return refuse("the code is not whole pages");
    if (mprotect(code, CODE_BYTES, PROT_READ | PROT_WRITE)) return answer(NO_MEMORY, 0, NULL, 0);
    memcpy(code, payload + 8, n_bytes);
    if (mprotect(code, CODE_BYTES, PROT_READ) || mprotect(code, n_executable, PROT_READ | PROT_EXEC))
        return refuse("the system forbids fresh code");
    __builtin___clear_cache(code, code + n_executable);
    answer(DONE, 0, NULL, 0);
}

/* What machine this is. */

/* The first line of a file that begins so, without that and what stands before its value. */
static int line_of(const char *path, const char *begin, char *to, size_t n) {
    char line[4096];
    FILE *file = fopen(path, "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        if (strncmp(line, begin, strlen(begin))) continue;
        char *value = strchr(line + strlen(begin), ':');
        value = *begin && value ? value + 1 : line;
        while (*value == ' ' || *value == '\t') value++;
        value[strcspn(value, "\r\n")] = 0;
        snprintf(to, n, "%s", value);
        found = 1;
    }
    if (file) fclose(file);
    return found;
}

/* Chooses CPUs for threads: the fastest, of these the last. */
static int choose_cpus(void) {
    long capacity[1024];
    int n_online = 0, n;
    cpu_set_t set;
    for (int t = 0; t < MOST_THREADS; t++) cpus[t] = -1;
    if (sched_getaffinity(0, sizeof set, &set)) return (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int cpu = 0; cpu < 1024 && cpu < CPU_SETSIZE; cpu++) {
        char path[96], text[32];
        capacity[cpu] = -1;
        if (!CPU_ISSET(cpu, &set)) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
        capacity[cpu] = line_of(path, "", text, sizeof text) ? atol(text) : 1024;
        n_online++;
    }
    for (n = 0; n < n_online && n < MOST_THREADS; n++) {
        int best = -1;
        for (int cpu = 0; cpu < 1024; cpu++)
            if (capacity[cpu] >= 0 && (best < 0 || capacity[cpu] >= capacity[best])) best = cpu;
        capacity[best] = -1;
        cpus[n] = best;
    }
    return n;
}

#define FUNCTION(name) { #name, (uintptr_t)name }
static const struct { const char *name; uintptr_t address; } functions[] = {
    FUNCTION(expf), FUNCTION(logf), FUNCTION(tanhf), FUNCTION(erff), FUNCTION(sinf), FUNCTION(cosf),
    FUNCTION(powf), FUNCTION(sincosf), FUNCTION(exp), FUNCTION(log), FUNCTION(tanh), FUNCTION(erf),
    FUNCTION(expm1f), FUNCTION(log1pf), FUNCTION(expm1), FUNCTION(log1p),
    FUNCTION(sin), FUNCTION(cos), FUNCTION(pow), FUNCTION(sincos), FUNCTION(memset), FUNCTION(memcpy),
    FUNCTION(memmove),
};

static void hello(int is_emulated, int n_cpus) {
    char text[16384], value[4096], name[64] = "";
    struct utsname system;
    size_t n = 0;
    uname(&system);
#define SAY(...) do { if (n < sizeof text) n += (size_t)snprintf(text + n, sizeof text - n, __VA_ARGS__); } while (0)
    SAY("protocol=%d\n", PROTOCOL);
    SAY("features=");
#if defined __aarch64__
    static const struct { int bit, word; const char *name; } known[] = {
        { 1, 1, "neon" }, { 9, 1, "fullfp16" }, { 10, 1, "fullfp16" }, { 20, 1, "dotprod" }, { 22, 1, "sve" },
        { 13, 2, "i8mm" }, { 14, 2, "bf16" }, { 1, 2, "sve2" },
    };
    unsigned long words[3] = { 0, getauxval(AT_HWCAP), getauxval(AT_HWCAP2) };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (words[known[i].word] >> known[i].bit & 1) SAY("%s ", known[i].name);
    SAY("\narch=aarch64\n");
    if (words[1] >> 11 & 1) {
        /* Of this core: others may be of another kind. */
        unsigned long midr;
        __asm__ volatile("mrs %0, midr_el1" : "=r"(midr));
        SAY("implementer=0x%02lx\npart=0x%03lx\n", midr >> 24 & 0xff, midr >> 4 & 0xfff);
    }
    /* QEMU 7 shows the host's list of CPUs, where no implementer is named. */
    if (!line_of("/proc/cpuinfo", "CPU implementer", value, sizeof value)) is_emulated = 1;
#elif defined __x86_64__
    if (line_of("/proc/cpuinfo", "flags", value, sizeof value)) SAY("%s", value);
    SAY("\narch=x86_64\n");
#else
    SAY("\narch=%s\n", system.machine);
#endif
    if (line_of("/proc/self/comm", "", name, sizeof name) && !strncmp(name, "qemu", 4)) is_emulated = 1;
    if (line_of("/proc/cpuinfo", "model name", value, sizeof value)) SAY("cpu=%s\n", value);
    SAY("system=%s %s\npage=%zu\ncores=%d\n", system.sysname, system.release, page, n_cpus);
    SAY("memory=%llu\n", (unsigned long long)sysconf(_SC_PHYS_PAGES) * page);
    SAY("emulated=%d\ncode=%llu\n", is_emulated, (unsigned long long)(uintptr_t)code);
    SAY("code_bytes=%zu\n", CODE_BYTES);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        SAY("%s@%llu\n", functions[i].name, (unsigned long long)functions[i].address);
    answer(DONE, 0, text, n < sizeof text ? n : sizeof text);
}

/* What the machine says of itself meanwhile: how fast its CPU is, and how warm its warmest zone. */
static void state(void) {
    char path[96], text[32], said[96] = "";
    int n = 0, has_zone = 0;
    long warmest = 0;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpufreq/scaling_cur_freq", cpus[0] < 0 ? 0 : cpus[0]);
    if (line_of(path, "", text, sizeof text)) n = snprintf(said, sizeof said, "khz=%ld\n", atol(text));
    for (int zone = 0; zone < 32; zone++) {
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/temp", zone);
        if (!line_of(path, "", text, sizeof text)) continue;
        if (!has_zone || atol(text) > warmest) warmest = atol(text);
        has_zone = 1;
    }
    if (has_zone) n += snprintf(said + n, sizeof said - (size_t)n, "millicelsius=%ld\n", warmest);
    answer(DONE, 0, said, (size_t)n);
}

static void limit(uint64_t n) {
    struct rlimit rlimit;
    most_bytes = n;
    /* The buffers, and some for this program and its threads. Where it cannot be set, buffers are counted. */
    if (getrlimit(RLIMIT_AS, &rlimit) == 0 && n < ((uint64_t)1 << 46)) {
        rlim_t most = (rlim_t)(n + ((uint64_t)1 << 30));
        if (rlimit.rlim_cur == RLIM_INFINITY || most < rlimit.rlim_cur) rlimit.rlim_cur = most;
        setrlimit(RLIMIT_AS, &rlimit);
    }
}

int main(int argc, char **argv) {
    int is_emulated = argc > 1 && !strcmp(argv[1], "--emulated");
    struct frame frame;
    char *payload = NULL;
    size_t room = 0;
    page = (size_t)sysconf(_SC_PAGESIZE);
    code = mmap(NULL, CODE_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (code == MAP_FAILED) {
        fprintf(stderr, "tw-run: no memory for code: %s\n", strerror(errno));
        return 1;
    }
    int n_cpus = choose_cpus();
    pin(0);
    catch_signals();
    while (read_all(&frame, sizeof frame)) {
        struct buffer *b = buffer_of(frame.number);
        uint64_t size = 0;
        if (frame.what == UPLOAD) {
            /* It goes where it belongs at once. */
            if (!b || frame.n_bytes != b->n_bytes) {
                fprintf(stderr, "tw-run: an upload fits no buffer\n");
                return 1;
            }
            if (protect(b, PROT_READ | PROT_WRITE) || !read_all(b->data, b->n_bytes)) return 1;
            b->is_input = 1;
            protect(b, PROT_READ);
            answer(DONE, 0, NULL, 0);
            continue;
        }
        if (frame.n_bytes > CODE_BYTES + 4096) {
            fprintf(stderr, "tw-run: a frame is too long\n");
            return 1;
        }
        if (frame.n_bytes > room) {
            free(payload);
            payload = malloc(room = (size_t)frame.n_bytes);
            if (!payload) return 1;
        }
        if (!read_all(payload, (size_t)frame.n_bytes)) return 0;
        if (frame.n_bytes >= 8) memcpy(&size, payload, 8);
        switch (frame.what) {
        case HELLO:
            hello(is_emulated, n_cpus);
            break;
        case LIMIT:
            limit(size);
            answer(DONE, 0, NULL, 0);
            break;
        case BUFFER:
            if (frame.number >= MOST_BUFFERS || frame.n_bytes != 8) refuse("no buffer has such a number");
            else answer(make_buffer(&buffers[frame.number], size) ? DONE : NO_MEMORY, 0, NULL, 0);
            break;
        case FILL:
            if (!b || frame.n_bytes != 1) refuse("there is no such buffer to fill");
            else {
                memset(b->data, *payload, b->n_bytes);
                answer(DONE, 0, NULL, 0);
            }
            break;
        case DOWNLOAD:
            if (!b) refuse("there is no such buffer to read");
            else answer(DONE, 0, b->data, b->n_bytes);
            break;
        case CODE:
            load(payload, (size_t)frame.n_bytes);
            break;
        case RUN:
            run(payload, (size_t)frame.n_bytes);
            break;
        case STATE:
            state();
            break;
        default:
            refuse("this runner does not know what is asked of it");
        }
    }
    return 0;
}
