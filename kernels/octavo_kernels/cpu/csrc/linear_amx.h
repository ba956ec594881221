// Products in bfloat16 and int8 by AMX tiles, where there is AMX: blocks of up to 32 rows and one panel. The packed
// weight serves as it is: 16 steps of half a panel, 128 bytes apart, are a tile in the order that a dot wants.
//
// Tiles take a block of any number of rows: they sum in another order than vdpbf16ps does and take denormals for
// zeros, so a second way for few rows would make a row's result depend on how many there are. A dot takes about a
// cycle for each row of x, so few rows lose little by it.
#pragma once
#include "amx.h"
#include "linear.h"

#ifndef HAVE_AMX

INLINE void linear_task_by_tiles(const Linear *l, int64_t index, int type) { linear_task_of(l, index, type); }

#else

#define MAX_M_AMX (2 * TILE_ROWS)
// The tiles: a block's rows up to 16 and after (0, 1) times the panel's halves (0, 1).
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define X_0 4
#define X_1 5
#define W_0 6
#define W_1 7

INLINE void configure_for(int64_t m) {
    const uint8_t low = (uint8_t)min_i64(m, TILE_ROWS);
    const uint8_t high = (uint8_t)max_i64(m - TILE_ROWS, 1);  // not used by a block of up to 16 rows
    TileShapes shapes = {.palette = 1, .rows = {low, low, high, high, low, high, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < TILES; tile++)
        shapes.row_bytes[tile] = TILE_BYTES;
    tile_configure(&shapes);
}

// A macro, for a tile's number must be a literal.
#define DOT(sums, x, w, type)          \
    do {                               \
        if ((type) == BF16)            \
            tile_dot_bf16(sums, x, w); \
        else                           \
            tile_dot_int8(sums, x, w); \
    } while (0)

// 64 bytes of each of the block's m rows, times 16 steps of a panel.
INLINE void add_tiles(const char *x, int64_t stride, const char *w, int64_t m, int type) {
    tile_load(W_0, w, STEP_BYTES);
    tile_load(W_1, w + STEP_BYTES / 2, STEP_BYTES);
    tile_load(X_0, x, stride);
    DOT(SUMS_00, X_0, W_0, type);
    DOT(SUMS_01, X_0, W_1, type);
    if (m > TILE_ROWS) {
        tile_load(X_1, x + TILE_ROWS * stride, stride);
        DOT(SUMS_10, X_1, W_0, type);
        DOT(SUMS_11, X_1, W_1, type);
    }
}

// The same of the rows' last bytes, fewer than 64: what is missing of a tile is zeros, since what lies behind a
// row and a panel may be NaNs.
static void add_rest(const char *x, int64_t stride, const char *w, int64_t m, int64_t bytes, int type) {
    char x_tile[MAX_M_AMX][TILE_BYTES] = {0}, w_tile[TILE_ROWS][STEP_BYTES] = {0};
    for (int64_t r = 0; r < m; r++)
        memcpy(x_tile[r], x + r * stride, (size_t)bytes);
    memcpy(w_tile, w, (size_t)(bytes * PANEL));
    add_tiles(x_tile[0], TILE_BYTES, w_tile[0], m, type);
}

// `m` rows, as the tiles are configured for, and one panel.
INLINE void block_by_tiles(const Linear *l, int64_t row, int64_t panel, int64_t m, int type) {
    const int64_t stride = l->inputs * size_of(type), group_bytes = type == INT8 ? GROUP : stride;
    const int64_t groups = (stride + group_bytes - 1) / group_bytes;
    const char *x = (const char *)l->x + row * stride, *w = (const char *)l->packed + panel * stride * PANEL;
    Vec sums[MAX_M_AMX][2], totals[MAX_M_AMX][2];  // sums is int32 for int8
    for (int64_t r = 0; r < m; r++)
        totals[r][0] = totals[r][1] = (Vec){0};
    for (int64_t group = 0; group < groups; group++) {
        const int64_t end = min_i64(stride, (group + 1) * group_bytes);
        tile_zero(SUMS_00);
        tile_zero(SUMS_01);
        tile_zero(SUMS_10);
        tile_zero(SUMS_11);
        int64_t byte = group * group_bytes;
        for (; byte + TILE_BYTES <= end; byte += TILE_BYTES)
            add_tiles(x + byte, stride, w + byte * PANEL, m, type);
        if (byte < end)
            add_rest(x + byte, stride, w + byte * PANEL, m, end - byte, type);
        tile_store(SUMS_00, &sums[0][0], STEP_BYTES);
        tile_store(SUMS_01, &sums[0][1], STEP_BYTES);
        if (m > TILE_ROWS) {
            tile_store(SUMS_10, &sums[TILE_ROWS][0], STEP_BYTES);
            tile_store(SUMS_11, &sums[TILE_ROWS][1], STEP_BYTES);
        }
        for (int64_t r = 0; r < m; r++)
            for (int half = 0; half < 2; half++)
                if (type == INT8) {
                    const int64_t i = (row + r) * groups + group;
                    const VecInt sum = (VecInt)sums[r][half] - l->x_sums[i];
                    totals[r][half] += __builtin_convertvector(sum, Vec) * l->x_scales[i];
                } else {
                    totals[r][half] = sums[r][half];
                }
    }
    for (int64_t r = 0; r < m; r++)
        for (int half = 0; half < 2; half++)
            finish(l, row + r, panel * PANEL + half * LANES, totals[r][half], type);
}

// Blocks outside and panels inside, so that the tiles are configured once a block.
INLINE void linear_task_by_tiles(const Linear *l, int64_t index, int type) {
    const Part part = part_of(l, index);
    const int64_t rows = part.end - part.begin, blocks = (rows + MAX_M_AMX - 1) / MAX_M_AMX;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t from = part.begin + rows * i / blocks, to = part.begin + rows * (i + 1) / blocks;
        configure_for(to - from);
        for (int64_t panel = part.first_panel; panel < part.last_panel; panel++)
            block_by_tiles(l, from, panel, to - from, type);
    }
    tile_release();
}

#endif
