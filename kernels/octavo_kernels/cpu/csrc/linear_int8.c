// Linear layers in int8: a scale for each output of the weight, and one for each row of x, found as it comes.
#include <stdlib.h>

#include "linear.h"

#ifdef __AVX512VNNI__

#define ROWS_PER_TASK 8
#define SERIAL_NUMBERS 32768

typedef uint8_t VecByte __attribute__((vector_size(16)));

typedef struct {
    const void *x;
    uint8_t *quantised;
    float *scales;
    int64_t rows, inputs, type;
} Quantise;

// x / scale + 128, with the scale that takes the largest to 127. A row with a NaN or an infinity has a scale of
// NaN, so that its outputs are NaN as well.
INLINE void quantise_row(const Quantise *q, int64_t row, int type) {
    const void *x = at(q->x, row * q->inputs, type);
    uint8_t *to = q->quantised + row * q->inputs;
    const int64_t whole = q->inputs / LANES * LANES, rest = q->inputs - whole;
    Vec largest = {0}, odd = {0};  // x - x is 0 for finite numbers, else NaN
    for (int64_t i = 0; i < whole; i += LANES) {
        const Vec v = load(x, i, type);
        largest = max_vec(largest, max_vec(v, -v));
        odd += v - v;
    }
    if (rest) {
        const Vec v = load_part(x, whole, rest, type);
        largest = max_vec(largest, max_vec(v, -v));
        odd += v - v;
    }
    const float most = max_lanes(largest);
    const int is_odd = sum_lanes(odd) != 0;  // true of a NaN
    if (is_odd || most == 0) {
        q->scales[row] = is_odd ? NAN : 0.0f;
        memset(to, 128, (size_t)q->inputs);
        return;
    }
    const float factor = 127.0f / most;
    const Vec magic = splat(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer
    q->scales[row] = most / 127.0f;
    for (int64_t i = 0; i < whole + rest; i += LANES) {
        const Vec v = i < whole ? load(x, i, type) : load_part(x, whole, rest, type);
        const VecInt rounded = __builtin_convertvector((v * factor + magic) - magic, VecInt) + 128;
        const VecByte bytes = __builtin_convertvector(rounded, VecByte);
        memcpy(to + i, &bytes, (size_t)min_i64(LANES, q->inputs - i));
    }
}

static void quantise_task(void *context, int64_t index) {
    const Quantise *q = context;
    const int64_t end = min_i64(q->rows, (index + 1) * ROWS_PER_TASK);
    for (int64_t row = index * ROWS_PER_TASK; row < end; row++) {
        if (q->type == BF16)
            quantise_row(q, row, BF16);
        else
            quantise_row(q, row, F32);
    }
}

static void linear_task(void *context, int64_t index) { linear_task_of((const Linear *)context, index, INT8); }

// x [rows, inputs] of `type`, as bias [outputs] or NULL and out [rows, outputs]; inputs a multiple of 4; scales
// and sums (of the weight's rows) for the outputs, rounded up to a panel. Returns -1 when there is no memory.
EXPORT int64_t octavo_linear_int8(const void *x, const void *packed, const float *scales, const int32_t *sums,
                                  const void *bias, void *out, int64_t rows, int64_t outputs, int64_t inputs,
                                  int64_t type, int64_t threads) {
    float *x_scales = malloc((size_t)rows * (sizeof *x_scales + (size_t)inputs));
    if (!x_scales)
        return -1;
    uint8_t *quantised = (uint8_t *)(x_scales + rows);
    Quantise q = {x, quantised, x_scales, rows, inputs, type};
    parallel_for(rows * inputs < SERIAL_NUMBERS ? 1 : threads, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK,
                 quantise_task, &q);
    Linear l = {quantised, packed, bias, out, rows, outputs, inputs, type, 0, 0, x_scales, scales, sums};
    const int64_t tasks = divide(&l, threads);
    parallel_for(threads, tasks, linear_task, &l);
    free(x_scales);
    return 0;
}

#endif
