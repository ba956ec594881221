// Products with a weight that was packed once: x [M, K] times weight [N, K] transposed. For AVX-512 with BF16 and
// VNNI (linear_amx.h has those by AMX); elsewhere only the packing is compiled.
//
// Packed, the weight is panels of 32 outputs: [N / 32][K / P][32][P], the last one filled up with zeros, where P
// numbers fill 4 bytes: a float, a pair of bfloat16 (vdpbf16ps), or four int8 (vpdpbusd). A panel's 32 outputs of
// up to 12 rows of x are 24 registers of sums; a step loads the panel's two vectors once and broadcasts x.
#pragma once
#include "pool.h"
#include "vec.h"

#define PANEL 32
#define STEP_BYTES 128          // of a panel
#define MAX_M 12                // rows of a block
#define MAX_M_INT8 6            // whose totals need registers too: at 32 rows 1.6 x as fast as 12
#define M_TILE 192              // rows of x that a task does: they stay in the cache while panels pass by
#define WEIGHTS_PER_TASK 65536  // a task's share of the weight, in numbers
#define GROUP 128               // columns of int8 activations that share a scale

typedef struct {
    const void *x, *packed, *bias;
    void *out;
    int64_t rows, outputs, inputs, out_type, panels_per_task, tasks_per_tile;
    // For int8. The weight is unsigned, 128 more than it stands for: x_sums is what that adds to a group's sum.
    const float *scales;       // [outputs, rounded up to a panel]
    const float *x_scales;     // [rows, groups]
    const int32_t *x_sums;     // [rows, groups]: 128 x the sum of the group's numbers
} Linear;

#ifdef __AVX512BF16__

INLINE Vec multiply_add(Vec sum, const void *x, Vec w, int type) {
    int32_t bytes;
    memcpy(&bytes, x, sizeof bytes);
    const __m512i every = _mm512_set1_epi32(bytes);
    if (type == F32)
        return sum + (Vec)every * w;
    if (type == BF16)
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)every, (__m512bh)w);
    return (Vec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, every);  // int32 sums in the same registers
}

// Adds the bias to 16 outputs of a row and writes those there are.
INLINE void finish(const Linear *l, int64_t row, int64_t column, Vec sum, int type) {
    const int64_t count = min_i64(LANES, l->outputs - column), to = row * l->outputs + column;
    const int out_type = type == INT8 ? (int)l->out_type : type;
    if (type == INT8)
        sum *= load_f32(l->scales + column);
    if (count == LANES) {
        if (l->bias)
            sum += load(l->bias, column, out_type);
        store(l->out, to, sum, out_type);
    } else if (count > 0) {
        if (l->bias)
            sum += load_part(l->bias, column, count, out_type);
        store_part(l->out, to, count, sum, out_type);
    }
}

// `m` rows and one panel. Each number of the result is one sum in the order of the columns, whatever `m` is, so
// that a row's result does not depend on the rows beside it.
INLINE void block(const Linear *l, int64_t row, int64_t panel, int m, int type) {
    const int64_t steps = l->inputs * size_of(type) / 4;
    const char *w = (const char *)l->packed + panel * steps * STEP_BYTES;
    const int64_t stride = l->inputs * size_of(type);
    const char *x = (const char *)l->x + row * stride;
    const int64_t group_steps = type == INT8 ? GROUP / 4 : steps, groups = (steps + group_steps - 1) / group_steps;
    Vec sums[MAX_M][2], totals[MAX_M][2];
    for (int r = 0; r < m; r++)
        totals[r][0] = totals[r][1] = (Vec){0};
    for (int64_t group = 0; group < groups; group++) {
        for (int r = 0; r < m; r++)
            sums[r][0] = sums[r][1] =
                type == INT8 ? (Vec)(VecInt)_mm512_set1_epi32(-l->x_sums[(row + r) * groups + group]) : (Vec){0};
        const int64_t end = min_i64(steps, (group + 1) * group_steps);
        for (int64_t step = group * group_steps; step < end; step++) {
            const Vec w0 = load_f32((const float *)(w + step * STEP_BYTES));
            const Vec w1 = load_f32((const float *)(w + step * STEP_BYTES + STEP_BYTES / 2));
            for (int r = 0; r < m; r++) {
                const char *numbers = x + r * stride + step * 4;
                sums[r][0] = multiply_add(sums[r][0], numbers, w0, type);
                sums[r][1] = multiply_add(sums[r][1], numbers, w1, type);
            }
        }
        for (int r = 0; r < m; r++)
            for (int half = 0; half < 2; half++)
                if (type == INT8)
                    totals[r][half] += __builtin_convertvector((VecInt)sums[r][half], Vec) *
                                       l->x_scales[(row + r) * groups + group];
                else
                    totals[r][half] = sums[r][half];
    }
    for (int r = 0; r < m; r++)
        for (int half = 0; half < 2; half++)
            finish(l, row + r, panel * PANEL + half * LANES, totals[r][half], type);
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

// What a task does: rows [begin, end) of x and panels [first_panel, last_panel).
typedef struct {
    int64_t begin, end, first_panel, last_panel;
} Part;

INLINE Part part_of(const Linear *l, int64_t index) {
    const int64_t begin = index / l->tasks_per_tile * M_TILE, first = index % l->tasks_per_tile * l->panels_per_task;
    const int64_t panels = (l->outputs + PANEL - 1) / PANEL;
    return (Part){begin, min_i64(l->rows, begin + M_TILE), first, min_i64(panels, first + l->panels_per_task)};
}

INLINE void linear_task_of(const Linear *l, int64_t index, int type) {
    const Part part = part_of(l, index);
    const int64_t most = type == INT8 ? MAX_M_INT8 : MAX_M, rows = part.end - part.begin;
    const int64_t blocks = (rows + most - 1) / most;
    for (int64_t panel = part.first_panel; panel < part.last_panel; panel++)
        for (int64_t i = 0; i < blocks; i++) {  // blocks of equal size, or one row less
            const int64_t from = part.begin + rows * i / blocks, to = part.begin + rows * (i + 1) / blocks;
            block_of(l, from, panel, to - from, type);
        }
}

// How the work is divided: small enough that threads end together, and that a group of panels stays in the cache
// for all of x. Returns the number of tasks.
static inline int64_t divide(Linear *l, int64_t threads) {
    const int64_t panels = (l->outputs + PANEL - 1) / PANEL;
    const int64_t wanted = min_i64(WEIGHTS_PER_TASK / (PANEL * l->inputs), panels / (4 * threads));
    l->panels_per_task = max_i64(1, wanted);
    l->tasks_per_tile = (panels + l->panels_per_task - 1) / l->panels_per_task;
    return (l->rows + M_TILE - 1) / M_TILE * l->tasks_per_tile;
}

#endif
