/* Faults for LD_PRELOAD: a clock that goes back (CLOCK_BACK=seconds, every 200 calls) and a slow disk (SLOW_WRITE=ms). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long setting(const char *name) {
    const char *value = getenv(name);
    return value ? atol(value) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*next)(clockid_t, struct timespec *);
    static long calls;
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int code = next(clock, out);
    long back = setting("CLOCK_BACK");
    if (clock == CLOCK_REALTIME && back) out->tv_sec -= back * (__sync_add_and_fetch(&calls, 1) / 200);
    return code;
}

static void wait_ms(void) {
    long ms = setting("SLOW_WRITE");
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    if (ms) nanosleep(&pause, NULL);
}

int fsync(int file) {
    static int (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "fsync");
    wait_ms();
    return next(file);
}

ssize_t write(int file, const void *data, size_t size) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "write");
    if (file > 2 && size >= 4096) wait_ms();
    return next(file, data, size);
}
