// Root mean square norm, with the residual's addition where there is one.
#include "pool.h"
#include "vec.h"

#define ROWS_PER_TASK 8
#define SERIAL_NUMBERS 32768  // fewer are done before another thread has woken up

typedef struct {
    const void *x, *residual, *weight;
    void *norm, *sum;
    int64_t rows, size, type;
    float eps;
} Norm;

INLINE void norm_row(const Norm *n, int64_t row, int type) {
    const int64_t begin = row * n->size, whole = n->size / LANES * LANES, rest = n->size - whole;
    const void *x = at(n->x, begin, type);
    Vec squares = {0};
    if (n->residual) {
        // The sum is rounded to its type before it is normed, as the residual that the next layer sees is.
        const void *residual = at(n->residual, begin, type);
        void *sum = at_mut(n->sum, begin, type);
        for (int64_t i = 0; i < whole; i += LANES)
            store(sum, i, load(x, i, type) + load(residual, i, type), type);
        if (rest)
            store_part(sum, whole, rest, load_part(x, whole, rest, type) + load_part(residual, whole, rest, type), type);
        x = sum;
    }
    for (int64_t i = 0; i < whole; i += LANES) {
        Vec v = load(x, i, type);
        squares += v * v;
    }
    if (rest) {
        Vec v = load_part(x, whole, rest, type);
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)n->size + n->eps);
    void *norm = at_mut(n->norm, begin, type);
    for (int64_t i = 0; i < whole; i += LANES)
        store(norm, i, load(x, i, type) * scale * load(n->weight, i, type), type);
    if (rest)
        store_part(norm, whole, rest,
                   load_part(x, whole, rest, type) * scale * load_part(n->weight, whole, rest, type), type);
}

static void norm_task(void *context, int64_t index) {
    const Norm *n = context;
    const int64_t end = min_i64(n->rows, (index + 1) * ROWS_PER_TASK);
    for (int64_t row = index * ROWS_PER_TASK; row < end; row++) {
        if (n->type == BF16)
            norm_row(n, row, BF16);
        else
            norm_row(n, row, F32);
    }
}

// x, residual, norm, sum [rows, size]; weight [size]. Without a residual (NULL) there is no sum.
EXPORT void octavo_rms_norm(const void *x, const void *residual, const void *weight, void *norm, void *sum,
                            int64_t rows, int64_t size, float eps, int64_t type, int64_t threads) {
    Norm n = {x, residual, weight, norm, sum, rows, size, type, eps};
    const int64_t tasks = (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    parallel_for(rows * size < SERIAL_NUMBERS ? 1 : threads, tasks, norm_task, &n);
}
