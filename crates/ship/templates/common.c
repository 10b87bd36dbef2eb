#if defined(__GNUC__)
#define NET_API __attribute__((visibility("default")))
#define NET_HIDDEN __attribute__((visibility("hidden")))
#else
#error "a compiler with GNU C's attributes and atomic operations is needed"
#endif

/* Uses of a context, which one thread at a time has: `owner` is the process of the one that does, or 0. What a
 * process used when it forked is free in the child, as the thread that used it is not there. */

/* Begins a use; 0 where another thread of this process has one. */
static int net_begin_use(uint32_t *owner) {
    uint32_t known = 0;
    while (!__atomic_compare_exchange_n(owner, &known, NET_PROCESS, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        if (known == NET_PROCESS) return 0;
    return 1;
}

static void net_end_use(uint32_t *owner) { __atomic_store_n(owner, 0, __ATOMIC_RELEASE); }

/* Begins the last use, once nobody else has one. */
static void net_begin_last_use(uint32_t *owner) {
    while (!net_begin_use(owner)) sched_yield();
}

#ifdef NET_OLD_GLIBC
/* So that the library runs with every glibc since 2.17, wherever it is linked. */
#if defined(__x86_64__)
#define NET_GLIBC "GLIBC_2.2.5"
#else
#define NET_GLIBC "GLIBC_2.17"
#endif
#endif
