// Products with a weight that was packed once: x [M, K] times weight [N, K] transposed (linear_amx.h has those by
// AMX). Those in int8 are for AVX-512 with VNNI; elsewhere only their packing is compiled.
//
// Packed, the weight is panels of 32 outputs: [N / 32][K / P][32][P], the last one filled up with zeros, where P
// numbers fill 4 bytes: a float, a pair of bfloat16 (vdpbf16ps), or four int8 (vpdpbusd). With AVX-512 a panel's 32
// outputs of up to 12 rows of x are 24 registers of sums; a step loads the panel's two vectors once and broadcasts x.
// AVX2 has half as many registers of half the size, and no product of bfloat16: there a pair is widened to floats,
// and more than two rows take a panel in halves.
#pragma once
#include "pool.h"
#include "vec.h"

#define PANEL 32
#define STEP_BYTES 128          // of a panel
#ifdef __AVX512F__
#define MAX_M 12                // rows of a block
#define MAX_M_BF16 MAX_M
#else
#define MAX_M 6
#define MAX_M_BF16 4            // whose weights are widened into twice the registers
#endif
#define MAX_M_INT8 6            // whose totals need registers too: at 32 rows 1.6 x as fast as 12
#define M_TILE 192              // rows of x that a task does: they stay in the cache while panels pass by
#define WEIGHTS_PER_TASK 65536  // a task's share of the weight, in numbers
#define GROUP 128               // columns of int8 activations that share a scale

typedef struct {
    const void *x, *packed, *bias;
    void *out;
    int64_t rows, outputs, inputs, out_type, threads, panels_per_task, tasks_per_tile;
    // For int8. The weight is unsigned, 128 more than it stands for: x_sums is what that adds to a group's sum.
    const float *scales;       // [outputs, rounded up to a panel]
    const float *x_scales;     // [rows, groups]
    const int32_t *x_sums;     // [rows, groups]: 128 x the sum of the group's numbers
} Linear;

// Adds the products of 4 bytes of x, a float or two bfloat16, and as many of each output's weight.
INLINE Vec multiply_add(Vec sum, const void *x, Vec w, int type) {
    int32_t bytes;
    memcpy(&bytes, x, sizeof bytes);
    const VecInt every = bytes - (VecInt){0};
    if (type == F32)
        return sum + (Vec)every * w;
#ifdef __AVX512BF16__
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)every, (__m512bh)w);
#else
    const int32_t upper = ~0xffff;
    sum += (Vec)(every << 16) * (Vec)((VecInt)w << 16);
    return sum + (Vec)(every & upper) * (Vec)((VecInt)w & upper);
#endif
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
// that a row's result does not depend on the rows beside it. Half as many bytes as it reads are prefetched `ahead`.
INLINE void block_of_floats(const Linear *l, int64_t row, int64_t panel, int m, int type, const char *ahead) {
    const int64_t stride = l->inputs * size_of(type);
    const char *w = (const char *)l->packed + panel * stride * PANEL, *x = (const char *)l->x + row * stride;
    const int vectors = m > 2 ? 2 : PANEL / LANES;  // of a panel at a time
    for (int first = 0; first < PANEL / LANES; first += vectors) {
        Vec sums[MAX_M][PANEL / LANES];
        for (int r = 0; r < m; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = (Vec){0};
        for (int64_t step = 0; step < stride / 4; step++) {
            prefetch(ahead + step * STEP_BYTES / 2);
            for (int v = 0; v < vectors; v++) {
                const Vec weights = load_f32((const float *)(w + step * STEP_BYTES) + (first + v) * LANES);
                for (int r = 0; r < m; r++)
                    sums[r][v] = multiply_add(sums[r][v], x + r * stride + step * 4, weights, type);
            }
        }
        for (int r = 0; r < m; r++)
            for (int v = 0; v < vectors; v++)
                finish(l, row + r, panel * PANEL + (first + v) * LANES, sums[r][v], type);
    }
}

#ifdef __AVX512VNNI__

// The same in int8: the sum of a group is an exact integer, and a row's total is a sum of them in the order of the
// groups. Sums are of the integer type, for the compiler copies each of them at every step where they are cast.
INLINE void block_of_int8(const Linear *l, int64_t row, int64_t panel, int m, const char *ahead) {
    const int64_t stride = l->inputs, groups = (stride + GROUP - 1) / GROUP;
    const char *w = (const char *)l->packed + panel * stride * PANEL, *x = (const char *)l->x + row * stride;
    Vec totals[MAX_M][2];
    for (int r = 0; r < m; r++)
        totals[r][0] = totals[r][1] = (Vec){0};
    for (int64_t group = 0; group < groups; group++) {
        __m512i sums[MAX_M][2];
        for (int r = 0; r < m; r++)
            sums[r][0] = sums[r][1] = _mm512_set1_epi32(-l->x_sums[(row + r) * groups + group]);
        const int64_t end = min_i64(stride, (group + 1) * GROUP);
        for (int64_t byte = group * GROUP; byte < end; byte += 4) {
            prefetch(ahead + byte * PANEL / 2);
            const __m512i w0 = _mm512_loadu_si512(w + byte * PANEL);
            const __m512i w1 = _mm512_loadu_si512(w + byte * PANEL + STEP_BYTES / 2);
            for (int r = 0; r < m; r++) {
                int32_t numbers;
                memcpy(&numbers, x + r * stride + byte, sizeof numbers);
                sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, _mm512_set1_epi32(numbers));
                sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, _mm512_set1_epi32(numbers));
            }
        }
        for (int r = 0; r < m; r++)
            for (int half = 0; half < 2; half++)
                totals[r][half] +=
                    (Vec)_mm512_cvtepi32_ps(sums[r][half]) * l->x_scales[(row + r) * groups + group];
    }
    for (int r = 0; r < m; r++)
        for (int half = 0; half < 2; half++)
            finish(l, row + r, panel * PANEL + half * LANES, totals[r][half], INT8);
}

#endif

INLINE void block(const Linear *l, int64_t row, int64_t panel, int m, int type, const char *ahead) {
#ifdef __AVX512VNNI__
    if (type == INT8) {
        block_of_int8(l, row, panel, m, ahead);
        return;
    }
#endif
    block_of_floats(l, row, panel, m, type, ahead);
}

INLINE void block_of(const Linear *l, int64_t row, int64_t panel, int64_t m, int type, const char *ahead) {
    switch (m) {
    case 1: block(l, row, panel, 1, type, ahead); break;
    case 2: block(l, row, panel, 2, type, ahead); break;
    case 3: block(l, row, panel, 3, type, ahead); break;
    case 4: block(l, row, panel, 4, type, ahead); break;
    case 5: block(l, row, panel, 5, type, ahead); break;
#if MAX_M > 6
    case 6: block(l, row, panel, 6, type, ahead); break;
    case 7: block(l, row, panel, 7, type, ahead); break;
    case 8: block(l, row, panel, 8, type, ahead); break;
    case 9: block(l, row, panel, 9, type, ahead); break;
    case 10: block(l, row, panel, 10, type, ahead); break;
    case 11: block(l, row, panel, 11, type, ahead); break;
#endif
    default: block(l, row, panel, MAX_M, type, ahead);
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

// What a block asks the memory for while it computes: its share of the panel that this thread reads next. (The other
// threads take the tasks between.) A single block reads its panel only once, and leaves that to the processor's own
// prefetcher: it gets the address of its own panel.
INLINE const char *ahead_of(const Linear *l, const Part *part, int64_t panel, int64_t block, int64_t blocks, int type) {
    const int64_t after = panel + 1 < part->last_panel ? panel + 1 : part->first_panel + l->threads * l->panels_per_task;
    const int64_t next = blocks == 1 ? panel : min_i64(after, (l->outputs - 1) / PANEL);
    const int64_t panel_bytes = l->inputs * size_of(type) * PANEL;
    return (const char *)l->packed + next * panel_bytes + panel_bytes * block / blocks;
}

INLINE void linear_task_of(const Linear *l, int64_t index, int type) {
    const Part part = part_of(l, index);
    const int64_t most = type == INT8 ? MAX_M_INT8 : type == BF16 ? MAX_M_BF16 : MAX_M;
    const int64_t rows = part.end - part.begin;
    const int64_t blocks = (rows + most - 1) / most;
    for (int64_t panel = part.first_panel; panel < part.last_panel; panel++)
        for (int64_t i = 0; i < blocks; i++) {  // blocks of equal size, or one row less
            const int64_t from = part.begin + rows * i / blocks, to = part.begin + rows * (i + 1) / blocks;
            block_of(l, from, panel, to - from, type, ahead_of(l, &part, panel, i, blocks, type));
        }
}

// How the work is divided: small enough that threads end together, and that a group of panels stays in the cache
// for all of x. Returns the number of tasks.
static inline int64_t divide(Linear *l, int64_t threads) {
    const int64_t panels = (l->outputs + PANEL - 1) / PANEL;
    l->threads = threads;
    const int64_t wanted = min_i64(WEIGHTS_PER_TASK / (PANEL * l->inputs), panels / (4 * threads));
    l->panels_per_task = max_i64(1, wanted);
    l->tasks_per_tile = (panels + l->panels_per_task - 1) / l->panels_per_task;
    return (l->rows + M_TILE - 1) / M_TILE * l->tasks_per_tile;
}
