/* Preloaded into redis-server: its wall clock is off by as many microseconds as the file that
 * WARMQ_TEST_CLOCK names holds (8 bytes). Clocks that only measure are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile int64_t nothing = 0;
static const volatile int64_t *off_us = &nothing;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WARMQ_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    void *map = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) off_us = map;
    real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!real_gettime) begin();
    int answer = real_gettime(clock, at);
    if (answer == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = at->tv_nsec + *off_us % 1000000 * 1000;
        at->tv_sec += *off_us / 1000000 + (ns >= 1000000000) - (ns < 0);
        at->tv_nsec = ns + (ns < 0 ? 1000000000 : ns >= 1000000000 ? -1000000000 : 0);
    }
    return answer;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int answer = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return answer;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
