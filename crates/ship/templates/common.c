#if defined(__GNUC__)
#define NET_API __attribute__((visibility("default")))
#define NET_HIDDEN __attribute__((visibility("hidden")))
#else
#error "a compiler with GNU C's attributes and atomic operations is needed"
#endif

#ifdef NET_OLD_GLIBC
/* So that the library runs with every glibc since 2.17, wherever it is linked. */
#if defined(__x86_64__)
#define NET_GLIBC "GLIBC_2.2.5"
#else
#define NET_GLIBC "GLIBC_2.17"
#endif
#endif
