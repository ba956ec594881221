// Workers that wait for a job by spinning for a moment and then sleep on a futex.
//
// Kernels follow one another within tens of microseconds while a forward runs, so a spinning worker is there at
// once; when the engine has nothing to do all of them sleep. A job's tasks are handed out one by one, so a
// core that is slow or busy with something else does fewer. A worker that wakes up late finds the job closed
// and delays nobody.
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS 255
#define SPIN_NS 50000
#define SPINS_PER_LOOK 32  // at the clock

// What workers look at, in one word so that it changes at once: the job's number, how many workers it takes,
// whether it still takes any, and how many it has.
#define NUMBER(state) ((state) >> 32)
#define LIMIT(state) ((state) >> 16 & 0x7fff)
#define OPEN 0x8000ull
#define ACTIVE(state) ((state) & 0x7fff)

static _Atomic uint64_t state;
static _Atomic uint32_t wakeups;  // the futex: changes with every job
static _Atomic int32_t sleepers;
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;
static int64_t num_workers;  // under `caller`

// The job. Written while no worker is active and none can join.
static Task job_task;
static void *job_context;
static int64_t job_count;
static _Atomic int64_t job_next;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void pause_briefly(void) { __builtin_ia32_pause(); }

static void work(void) {
    for (;;) {
        int64_t index = atomic_fetch_add_explicit(&job_next, 1, memory_order_relaxed);
        if (index >= job_count)
            return;
        job_task(job_context, index);
    }
}

// Whether this worker has become part of a job that it has not seen yet.
static int join(uint64_t *seen) {
    uint64_t current = atomic_load_explicit(&state, memory_order_acquire);
    while ((current & OPEN) && NUMBER(current) != *seen && ACTIVE(current) < LIMIT(current))
        if (atomic_compare_exchange_weak_explicit(&state, &current, current + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *seen = NUMBER(current);
            return 1;
        }
    return 0;
}

static int spin_for_job(uint64_t *seen) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (join(seen))
                return 1;
            pause_briefly();
        }
    } while (now_ns() < end);
    return 0;
}

static void *worker(void *unused) {
    uint64_t seen = 0;
    for (;;) {
        if (spin_for_job(&seen)) {
            work();
            atomic_fetch_sub_explicit(&state, 1, memory_order_release);
            continue;
        }
        // The count of wake-ups is read before the last look: a job that comes after the look changes it.
        atomic_fetch_add(&sleepers, 1);
        uint32_t before = atomic_load(&wakeups);
        uint64_t current = atomic_load(&state);
        if (!((current & OPEN) && NUMBER(current) != seen && ACTIVE(current) < LIMIT(current)))
            syscall(SYS_futex, &wakeups, FUTEX_WAIT_PRIVATE, before, NULL, NULL, 0);
        atomic_fetch_sub(&sleepers, 1);
    }
    return unused;
}

// As many workers as asked for, or as the system allows.
static void grow(int64_t wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 21);
    pthread_t thread;
    while (num_workers < wanted && pthread_create(&thread, &attributes, worker, NULL) == 0)
        num_workers++;
    pthread_attr_destroy(&attributes);
}

void parallel_for(int64_t threads, int64_t count, Task task, void *context) {
    int64_t helpers = (threads < count ? threads : count) - 1;
    if (helpers > MAX_WORKERS)
        helpers = MAX_WORKERS;
    if (helpers < 1 || pthread_mutex_trylock(&caller) != 0) {
        for (int64_t i = 0; i < count; i++)
            task(context, i);
        return;
    }
    if (num_workers < helpers)
        grow(helpers);
    job_task = task;
    job_context = context;
    job_count = count;
    atomic_store_explicit(&job_next, 0, memory_order_relaxed);
    uint64_t number = (NUMBER(atomic_load_explicit(&state, memory_order_relaxed)) + 1) & 0xffffffff;
    atomic_store(&state, number << 32 | (uint64_t)helpers << 16 | OPEN);
    atomic_fetch_add(&wakeups, 1);
    if (atomic_load(&sleepers) > 0)
        syscall(SYS_futex, &wakeups, FUTEX_WAKE_PRIVATE, (int)helpers, NULL, NULL, 0);
    work();
    atomic_fetch_and_explicit(&state, ~OPEN, memory_order_acq_rel);
    for (int64_t spins = 0; ACTIVE(atomic_load_explicit(&state, memory_order_acquire)); spins++) {
        if (spins < 4096)
            pause_briefly();
        else
            sched_yield();  // more threads than cores: let the last one run
    }
    pthread_mutex_unlock(&caller);
}
