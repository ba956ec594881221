// The threads that kernels share.
#pragma once
#include <stdint.h>

typedef void (*Task)(void *context, int64_t index);

// Calls task(context, i) for every i in [0, count), on up to `threads` threads, the calling one among them.
// Returns when all are done. Any thread may call; while one caller has the pool, another does its own work.
void parallel_for(int64_t threads, int64_t count, Task task, void *context);
