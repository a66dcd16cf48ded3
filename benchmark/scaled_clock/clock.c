/* A C library's clocks and timeouts at 1/K of real time, for LD_PRELOAD.
 *
 * SCALED_CLOCK is "K:NS": the divisor, and the wall time in ns at which all processes began to
 * scale, so that they agree. Monotonic clocks are divided by K, wall clocks run on from NS. CPU
 * clocks count real time. Not covered, because nothing here waits with them: timerfd, interval
 * timers, timeouts of sockets in the kernel, direct futex calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define S 1000000000LL
typedef struct timespec ts_t;

static int64_t divisor, start_ns;

/* The function of libc. It is resolved at the first call; a race resolves it twice. */
#define NEXT(type, name, ...)                                                                      \
    static type (*next)(__VA_ARGS__);                                                              \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static void read_divisor(void)
{
    const char *text = getenv("SCALED_CLOCK");
    char *end = NULL;
    int64_t k = text ? strtoll(text, &end, 10) : 1;
    start_ns = end && *end == ':' ? strtoll(end + 1, NULL, 10) : 0;
    divisor = k > 0 ? k : 1;
}

static int64_t k(void)
{
    if (!divisor) read_divisor();
    return divisor;
}

static int64_t ns_of(const ts_t *t) { return t->tv_sec * S + t->tv_nsec; }
static ts_t ts_of(int64_t ns) { return (ts_t){ns / S, ns % S}; }

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static int is_scaled(clockid_t clock)
{
    return is_wall(clock) || clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW
        || clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME;
}

static int64_t scaled(clockid_t clock, int64_t ns)
{
    return is_wall(clock) ? start_ns + (ns - start_ns) / k() : ns / k();
}

/* The real time at which a scaled clock shows this time. */
static ts_t real_deadline(clockid_t clock, const ts_t *at)
{
    int64_t ns = ns_of(at), from = is_wall(clock) ? start_ns : 0;
    /* A time so far ahead that it means never must not overflow. */
    if (ns > INT64_MAX / 2 / k()) return *at;
    return ts_of(from + (ns - from) * k());
}

static ts_t real_duration(const ts_t *d)
{
    return d->tv_sec > INT64_MAX / 2 / S / k() ? *d : ts_of(ns_of(d) * k());
}

static int real_ms(int ms) { return ms <= 0 ? ms : ms > INT_MAX / k() ? INT_MAX : (int)(ms * k()); }

/* Clocks */

int clock_gettime(clockid_t clock, ts_t *now)
{
    NEXT(int, clock_gettime, clockid_t, ts_t *);
    int failed = next(clock, now);
    if (!failed && k() > 1 && is_scaled(clock)) *now = ts_of(scaled(clock, ns_of(now)));
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    ts_t t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    *now = (struct timeval){t.tv_sec, t.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now)
{
    ts_t t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (now) *now = t.tv_sec;
    return t.tv_sec;
}

/* Sleeps */

int clock_nanosleep(clockid_t clock, int flags, const ts_t *wanted, ts_t *left)
{
    NEXT(int, clock_nanosleep, clockid_t, int, const ts_t *, ts_t *);
    if (!is_scaled(clock)) return next(clock, flags, wanted, left);
    int is_deadline = flags & TIMER_ABSTIME;
    ts_t real = is_deadline ? real_deadline(clock, wanted) : real_duration(wanted);
    int failed = next(clock, flags, &real, left);
    if (failed == EINTR && left && !is_deadline) *left = ts_of(ns_of(left) / k());
    return failed;
}

int nanosleep(const ts_t *wanted, ts_t *left)
{
    int failed = clock_nanosleep(CLOCK_MONOTONIC, 0, wanted, left);
    if (!failed) return 0;
    errno = failed;
    return -1;
}

int usleep(useconds_t us)
{
    ts_t wanted = ts_of(us * 1000LL);
    return nanosleep(&wanted, NULL);
}

unsigned sleep(unsigned seconds)
{
    ts_t wanted = {seconds, 0}, left;
    return nanosleep(&wanted, &left) ? (unsigned)left.tv_sec : 0;
}

/* Waits for files */

int poll(struct pollfd *files, nfds_t n, int ms)
{
    NEXT(int, poll, struct pollfd *, nfds_t, int);
    return next(files, n, real_ms(ms));
}

int ppoll(struct pollfd *files, nfds_t n, const ts_t *wait, const sigset_t *mask)
{
    NEXT(int, ppoll, struct pollfd *, nfds_t, const ts_t *, const sigset_t *);
    ts_t real;
    if (wait) real = real_duration(wait);
    return next(files, n, wait ? &real : NULL, mask);
}

int select(int n, fd_set *in, fd_set *out, fd_set *other, struct timeval *wait)
{
    NEXT(int, select, int, fd_set *, fd_set *, fd_set *, struct timeval *);
    if (!wait) return next(n, in, out, other, NULL);
    ts_t wanted = {wait->tv_sec, wait->tv_usec * 1000}, real = real_duration(&wanted);
    struct timeval left = {real.tv_sec, real.tv_nsec / 1000};
    int ready = next(n, in, out, other, &left);
    int64_t left_us = (left.tv_sec * 1000000LL + left.tv_usec) / k();
    *wait = (struct timeval){left_us / 1000000, left_us % 1000000};
    return ready;
}

int pselect(int n, fd_set *in, fd_set *out, fd_set *other, const ts_t *wait, const sigset_t *mask)
{
    NEXT(int, pselect, int, fd_set *, fd_set *, fd_set *, const ts_t *, const sigset_t *);
    ts_t real;
    if (wait) real = real_duration(wait);
    return next(n, in, out, other, wait ? &real : NULL, mask);
}

int epoll_wait(int file, struct epoll_event *events, int n, int ms)
{
    NEXT(int, epoll_wait, int, struct epoll_event *, int, int);
    return next(file, events, n, real_ms(ms));
}

int epoll_pwait(int file, struct epoll_event *events, int n, int ms, const sigset_t *mask)
{
    NEXT(int, epoll_pwait, int, struct epoll_event *, int, int, const sigset_t *);
    return next(file, events, n, real_ms(ms), mask);
}

int epoll_pwait2(int file, struct epoll_event *events, int n, const ts_t *wait, const sigset_t *mask)
{
    NEXT(int, epoll_pwait2, int, struct epoll_event *, int, const ts_t *, const sigset_t *);
    ts_t real;
    if (wait) real = real_duration(wait);
    return next(file, events, n, wait ? &real : NULL, mask);
}

/* Waits for threads */

int sem_timedwait(sem_t *semaphore, const ts_t *until)
{
    NEXT(int, sem_timedwait, sem_t *, const ts_t *);
    ts_t real = real_deadline(CLOCK_REALTIME, until);
    return next(semaphore, &real);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const ts_t *until)
{
    NEXT(int, sem_clockwait, sem_t *, clockid_t, const ts_t *);
    ts_t real = real_deadline(clock, until);
    return next(semaphore, clock, &real);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const ts_t *until)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const ts_t *);
    /* dlsym may find the function of an older, smaller pthread_cond_t. */
    if (!next) *(void **)&next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    /* The condition's clock is not known here; no machine has been up for 30 years. */
    clockid_t clock = until->tv_sec > 1000000000 ? CLOCK_REALTIME : CLOCK_MONOTONIC;
    ts_t real = real_deadline(clock, until);
    return next(cond, mutex, &real);
}

int pthread_cond_clockwait(
    pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const ts_t *until)
{
    NEXT(int, pthread_cond_clockwait, pthread_cond_t *, pthread_mutex_t *, clockid_t, const ts_t *);
    ts_t real = real_deadline(clock, until);
    return next(cond, mutex, clock, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const ts_t *until)
{
    NEXT(int, pthread_mutex_timedlock, pthread_mutex_t *, const ts_t *);
    ts_t real = real_deadline(CLOCK_REALTIME, until);
    return next(mutex, &real);
}

int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const ts_t *until)
{
    NEXT(int, pthread_mutex_clocklock, pthread_mutex_t *, clockid_t, const ts_t *);
    ts_t real = real_deadline(clock, until);
    return next(mutex, clock, &real);
}
