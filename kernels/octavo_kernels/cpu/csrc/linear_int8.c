// Linear layers in int8: a scale for each output of the weight, and one for each group of a row's
// columns, found as they come.
#ifdef __AVX512VNNI__
#include <stdlib.h>

#include "linear_best.h"

#define ROWS_PER_TASK 8
#define SERIAL_NUMBERS 32768

typedef struct {
    const void *x;
    int8_t *quantised;
    float *scales;  // [rows, groups], as `sums`
    int32_t *sums;
    int64_t rows, inputs, groups, type;
} Quantise;

// x / scale, with the scale that takes the group's largest to 127. A group with a NaN or an infinity has a scale
// of NaN, so that the row's outputs are NaN as well.
INLINE void quantise_group(const Quantise *q, int64_t row, int64_t group, int type) {
    const int64_t begin = group * GROUP, count = min_i64(GROUP, q->inputs - begin);
    const void *x = at(q->x, row * q->inputs + begin, type);
    int8_t *to = q->quantised + row * q->inputs + begin;
    Vec numbers[GROUP / LANES], largest = {0}, odd = {0};  // x - x is 0 for finite numbers, else NaN
    const int vectors = (int)((count + LANES - 1) / LANES);
    for (int i = 0; i < vectors; i++) {
        const int64_t left = count - i * LANES;
        numbers[i] = left >= LANES ? load(x, i * LANES, type) : load_part(x, i * LANES, left, type);
        largest = max_vec(largest, max_vec(numbers[i], -numbers[i]));
        odd += numbers[i] - numbers[i];
    }
    const float most = max_lanes(largest);
    const int is_odd = sum_lanes(odd) != 0;  // true of a NaN
    const float factor = is_odd || most == 0 ? 0.0f : 127.0f / most;
    const Vec magic = splat(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer
    VecInt sums = {0};
    for (int i = 0; i < vectors; i++) {
        const Vec v = is_odd ? (Vec){0} : numbers[i];
        const VecInt rounded = __builtin_convertvector((v * factor + magic) - magic, VecInt);
        const VecByte bytes = __builtin_convertvector(rounded, VecByte);
        memcpy(to + i * LANES, &bytes, (size_t)min_i64(LANES, count - i * LANES));
        sums += rounded;
    }
    q->scales[row * q->groups + group] = is_odd ? NAN : most / 127.0f;
    q->sums[row * q->groups + group] = 128 * _mm512_reduce_add_epi32((__m512i)sums);
}

INLINE void quantise_row(const Quantise *q, int64_t row, int type) {
    for (int64_t group = 0; group < q->groups; group++)
        quantise_group(q, row, group, type);
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

static void linear_task(void *context, int64_t index) {
    linear_task_by_tiles((const Linear *)context, index, INT8);
}

// The product's left side in int8, in memory that `free(l->x_scales)` gives back. Returns -1 when there is none.
static int64_t quantise(Linear *l, const void *x, int64_t type, int64_t threads) {
    const int64_t groups = (l->inputs + GROUP - 1) / GROUP, numbers = l->rows * groups;
    float *scales = malloc((size_t)numbers * (sizeof(float) + sizeof(int32_t)) + (size_t)(l->rows * l->inputs));
    if (!scales)
        return -1;
    int32_t *sums = (int32_t *)(scales + numbers);
    Quantise q = {x, (int8_t *)(sums + numbers), scales, sums, l->rows, l->inputs, groups, type};
    parallel_for(l->rows * l->inputs < SERIAL_NUMBERS ? 1 : threads, (l->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK,
                 quantise_task, &q);
    l->x = q.quantised;
    l->x_scales = scales;
    l->x_sums = sums;
    return 0;
}

// x [rows, inputs] of `type`, as bias [outputs] or NULL and out [rows, outputs]; inputs a multiple of 4; scales
// [outputs, rounded up to a panel]. Returns -1 when there is no memory.
EXPORT int64_t octavo_linear_int8(const void *x, const void *packed, const float *scales, const void *bias,
                                  void *out, int64_t rows, int64_t outputs, int64_t inputs, int64_t type,
                                  int64_t threads) {
    Linear l = {.packed = packed, .bias = bias, .out = out, .rows = rows, .outputs = outputs, .inputs = inputs,
                .out_type = type, .scales = scales};
    if (quantise(&l, x, type, threads))
        return -1;
    const int64_t tasks = divide(&l, threads);
    parallel_for(threads, tasks, linear_task, &l);
    free((void *)l.x_scales);
    return 0;
}

// The `count` largest outputs of each row: values, ids [rows, count]. Returns -1 when there is no memory.
EXPORT int64_t octavo_linear_int8_best(const void *x, const void *packed, const float *scales, float *values,
                                       int64_t *ids, int64_t count, int64_t rows, int64_t outputs, int64_t inputs,
                                       int64_t type, int64_t threads) {
    Linear l = {.packed = packed, .rows = rows, .outputs = outputs, .inputs = inputs, .out_type = type, .scales = scales};
    if (quantise(&l, x, type, threads))
        return -1;
    const int64_t failed = best_of_linear(&l, INT8, count, values, ids, threads);
    free((void *)l.x_scales);
    return failed;
}

#endif
