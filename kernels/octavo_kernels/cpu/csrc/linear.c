// Products with a weight that was packed once: x [M, K] times weight [N, K] transposed.
//
// Packed, the weight is panels of 32 outputs: [N / 32][K / P][32][P], the last one filled up with zeros, where P
// is 2 for bfloat16 (vdpbf16ps multiplies pairs) and 1 for float32. A panel's 32 outputs of up to 12 rows of x
// are 24 registers of sums; a step over P columns loads the panel's two vectors once and broadcasts x.
#include "pool.h"
#include "vec.h"

#define PANEL 32
#define STEP_BYTES 128          // of a panel: 32 pairs of bfloat16, or 32 floats
#define MAX_M 12                // rows of a block
#define M_TILE 192              // rows of x that a task does: they stay in the cache while panels pass by
#define WEIGHTS_PER_TASK 65536  // a task's share of the weight, in numbers

typedef struct {
    const void *x, *packed, *bias;
    void *out;
    int64_t rows, outputs, inputs, x_stride, panels_per_task, tasks_per_tile, type;
} Linear;

#ifdef __AVX512BF16__

INLINE Vec multiply_add(Vec sum, const void *x, Vec w, int type) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    if (type == F32)
        return sum + (Vec)_mm512_set1_epi32(pair) * w;
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}

// Adds the bias to 16 outputs of a row and writes those there are.
INLINE void finish(const Linear *l, int64_t row, int64_t column, Vec sum, int type) {
    const int64_t count = min_i64(LANES, l->outputs - column), to = row * l->outputs + column;
    if (count == LANES) {
        if (l->bias)
            sum += load(l->bias, column, type);
        store(l->out, to, sum, type);
    } else if (count > 0) {
        if (l->bias)
            sum += load_part(l->bias, column, count, type);
        store_part(l->out, to, count, sum, type);
    }
}

// `m` rows and one panel. Each number of the result is one sum in the order of the columns, whatever `m` is, so
// that a row's result does not depend on the rows beside it.
INLINE void block(const Linear *l, int64_t row, int64_t panel, int m, int type) {
    const int64_t steps = l->inputs / (type == BF16 ? 2 : 1);
    const char *w = (const char *)l->packed + panel * steps * STEP_BYTES;
    const char *x = at(l->x, row * l->x_stride, type);
    const int64_t stride = l->x_stride * size_of(type);
    Vec sums[MAX_M][2];
    for (int r = 0; r < m; r++)
        sums[r][0] = sums[r][1] = (Vec){0};
    for (int64_t step = 0; step < steps; step++) {
        const Vec w0 = load_f32((const float *)(w + step * STEP_BYTES));
        const Vec w1 = load_f32((const float *)(w + step * STEP_BYTES + STEP_BYTES / 2));
        for (int r = 0; r < m; r++) {
            const char *number = x + r * stride + step * 4;
            sums[r][0] = multiply_add(sums[r][0], number, w0, type);
            sums[r][1] = multiply_add(sums[r][1], number, w1, type);
        }
    }
    for (int r = 0; r < m; r++)
        for (int half = 0; half < 2; half++)
            finish(l, row + r, panel * PANEL + half * LANES, sums[r][half], type);
}

INLINE void block_of(const Linear *l, int64_t row, int64_t panel, int64_t m, int type) {
    switch (m) {
    case 1: block(l, row, panel, 1, type); break;
    case 2: block(l, row, panel, 2, type); break;
    case 3: block(l, row, panel, 3, type); break;
    case 4: block(l, row, panel, 4, type); break;
    case 5: block(l, row, panel, 5, type); break;
    case 6: block(l, row, panel, 6, type); break;
    case 7: block(l, row, panel, 7, type); break;
    case 8: block(l, row, panel, 8, type); break;
    case 9: block(l, row, panel, 9, type); break;
    case 10: block(l, row, panel, 10, type); break;
    case 11: block(l, row, panel, 11, type); break;
    default: block(l, row, panel, 12, type);
    }
}

INLINE void linear_task_of(const Linear *l, int64_t index, int type) {
    const int64_t begin = index / l->tasks_per_tile * M_TILE, end = min_i64(l->rows, begin + M_TILE);
    const int64_t panels = (l->outputs + PANEL - 1) / PANEL, first = index % l->tasks_per_tile * l->panels_per_task;
    const int64_t last = min_i64(panels, first + l->panels_per_task);
    const int64_t blocks = (end - begin + MAX_M - 1) / MAX_M;
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t i = 0; i < blocks; i++) {  // blocks of equal size, or one row less
            const int64_t from = begin + (end - begin) * i / blocks, to = begin + (end - begin) * (i + 1) / blocks;
            block_of(l, from, panel, to - from, type);
        }
}

static void linear_task(void *context, int64_t index) {
    const Linear *l = context;
    if (l->type == BF16)
        linear_task_of(l, index, BF16);
    else
        linear_task_of(l, index, F32);
}

// x [rows, inputs] with rows `x_stride` apart; bias [outputs] or NULL; out [rows, outputs]. `inputs` is even.
EXPORT void octavo_linear(const void *x, const void *packed, const void *bias, void *out, int64_t rows,
                          int64_t outputs, int64_t inputs, int64_t x_stride, int64_t type, int64_t threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    // Small enough that threads end together, and that a panel group stays in the cache for all of x.
    int64_t per_task = max_i64(1, WEIGHTS_PER_TASK / (PANEL * inputs));
    per_task = max_i64(1, min_i64(per_task, panels / (4 * threads)));
    const int64_t tasks_per_tile = (panels + per_task - 1) / per_task;
    Linear l = {x, packed, bias, out, rows, outputs, inputs, x_stride, per_task, tasks_per_tile, type};
    parallel_for(threads, (rows + M_TILE - 1) / M_TILE * tasks_per_tile, linear_task, &l);
}

#endif

// weight [outputs, inputs], contiguous; packed holds outputs, rounded up to a whole panel, times inputs.
EXPORT void octavo_pack_linear(const void *weight, void *packed, int64_t outputs, int64_t inputs, int64_t type) {
    const int64_t per_step = type == BF16 ? 2 : 1, panels = (outputs + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t step = 0; step < inputs / per_step; step++)
            for (int64_t i = 0; i < PANEL; i++) {
                char *to = (char *)packed + ((panel * (inputs / per_step) + step) * PANEL + i) * 4;
                const int64_t row = panel * PANEL + i;
                if (row < outputs)
                    memcpy(to, at(weight, row * inputs + step * per_step, (int)type), 4);  // a pair, or one float
                else
                    memset(to, 0, 4);
            }
}
