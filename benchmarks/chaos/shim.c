// Loaded into a server with LD_PRELOAD by benchmarks.chaos: shifts the wall clock and delays writes
// to regular files, by two numbers in a file that the benchmark changes while the server runs.
//
//     QUICKSTEP_CHAOS_SHIM   path of a file of two int64: nanoseconds added to CLOCK_REALTIME, and
//                            microseconds that each write, truncation and sync of a file takes
//
// The monotonic clock is the kernel's. Processes that the server starts inherit both.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *values;

__attribute__((constructor)) static void open_values(void) {
    const char *path = getenv("QUICKSTEP_CHAOS_SHIM");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) values = found;
    close(file);
}

static void shift(struct timespec *time) {
    if (!values) return;
    int64_t ns = time->tv_sec * INT64_C(1000000000) + time->tv_nsec + values[0];
    time->tv_sec = ns / 1000000000;
    time->tv_nsec = ns % 1000000000;
}

static int real_time(clockid_t clock, struct timespec *time) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, time);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = real_time(clock, time);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(time);
    return status;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

static void delay(int file) {
    struct stat found;
    if (!values || !values[1] || fstat(file, &found) || !S_ISREG(found.st_mode)) return;
    struct timespec wait = {values[1] / 1000000, values[1] % 1000000 * 1000};
    nanosleep(&wait, NULL);
}

#define DELAYED(result, name, arguments, passed)                             \
    result name arguments {                                                  \
        static result(*next) arguments;                                      \
        if (!next) next = (result(*) arguments)dlsym(RTLD_NEXT, #name);      \
        delay(file);                                                         \
        return next passed;                                                  \
    }

DELAYED(ssize_t, write, (int file, const void *bytes, size_t size), (file, bytes, size))
DELAYED(ssize_t, pwrite, (int file, const void *bytes, size_t size, off_t at), (file, bytes, size, at))
DELAYED(ssize_t, pwrite64, (int file, const void *bytes, size_t size, off64_t at), (file, bytes, size, at))
DELAYED(ssize_t, writev, (int file, const struct iovec *parts, int num), (file, parts, num))
DELAYED(int, ftruncate64, (int file, off64_t size), (file, size))
DELAYED(int, fsync, (int file), (file))
DELAYED(int, fdatasync, (int file), (file))
