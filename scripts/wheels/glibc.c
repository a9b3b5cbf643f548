/* Symbols of newer C libraries that the objects of the wheels use: those of Ferry (pthread_cond_clockwait) and of
   libstdc++ (the other two). Linked next to the stubs of glibc 2.28 (scripts/wheels/toolchain.sh). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/random.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum { kNsPerS = 1000000000 };

/* glibc 2.32. False is always right: counters of shared pointers are then always atomic. */
HIDDEN char __libc_single_threaded = 0;

/* glibc 2.36. std::random_device calls it. */
HIDDEN uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value) {
  }
  return value;
}

static int64_t ns_of(struct timespec time) { return time.tv_sec * (int64_t)kNsPerS + time.tv_nsec; }

/* Waits on the clock of the condition variable, which is the real-time clock. A clock that is set back prolongs the
   wait. */
static int wait_on_realtime(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                            const struct timespec* deadline) {
  struct timespec now;
  struct timespec now_realtime;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &now_realtime) != 0) return EINVAL;
  const int64_t until_ns = ns_of(now_realtime) + ns_of(*deadline) - ns_of(now);
  const struct timespec until = {.tv_sec = until_ns / kNsPerS, .tv_nsec = until_ns % kNsPerS};
  return pthread_cond_timedwait(condition, mutex, &until);
}

/* glibc 2.30; the C library's own where it has one. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* deadline) {
  typedef int (*Clockwait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static _Atomic(Clockwait) known = NULL;
  Clockwait wait = atomic_load(&known);
  if (wait == NULL) {
    wait = (Clockwait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    if (wait == NULL) wait = wait_on_realtime;
    atomic_store(&known, wait);
  }
  return wait(condition, mutex, clock, deadline);
}
