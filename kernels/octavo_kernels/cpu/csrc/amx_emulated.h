// The operations of amx.h in plain C, for tests, by Intel's manual (Software Developer's Manual, volume 2):
// tiles hold zeros beyond their shape; tdpbf16ps sums the even and the odd products apart, each by fused
// multiply-adds that round to nearest and take denormals for zeros. What the CPU would refuse is a trap here too.
#pragma once

typedef struct {
    int configured;
    TileShapes shapes;
    uint8_t data[TILES][TILE_ROWS][TILE_BYTES];
} EmulatedTiles;

static _Thread_local EmulatedTiles tiles;

static inline void tile_require(int met) {
    if (!met)
        __builtin_trap();
}

static inline void tile_require_usable(int tile) {
    tile_require(tiles.configured && tile >= 0 && tile < TILES && tiles.shapes.rows[tile] > 0);
}

static inline void tile_configure(const TileShapes *shapes) {
    const TileShapes none = {0};
    tile_require(shapes->palette == 1 && shapes->start_row == 0);
    tile_require(memcmp(shapes->reserved, none.reserved, sizeof none.reserved) == 0);
    for (int tile = 0; tile < 16; tile++) {
        tile_require(shapes->rows[tile] <= TILE_ROWS && shapes->row_bytes[tile] <= TILE_BYTES);
        tile_require((shapes->rows[tile] == 0) == (shapes->row_bytes[tile] == 0));
        tile_require(tile < TILES || shapes->rows[tile] == 0);
    }
    tiles = (EmulatedTiles){.configured = 1, .shapes = *shapes};
}

static inline void tile_release(void) { tiles = (EmulatedTiles){0}; }

static inline void tile_zero(int tile) {
    tile_require_usable(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static inline void tile_load(int tile, const void *from, int64_t stride_bytes) {
    tile_zero(tile);
    for (int row = 0; row < tiles.shapes.rows[tile]; row++)
        memcpy(tiles.data[tile][row], (const char *)from + row * stride_bytes, tiles.shapes.row_bytes[tile]);
}

static inline void tile_store(int tile, void *to, int64_t stride_bytes) {
    tile_require_usable(tile);
    for (int row = 0; row < tiles.shapes.rows[tile]; row++)
        memcpy((char *)to + row * stride_bytes, tiles.data[tile][row], tiles.shapes.row_bytes[tile]);
}

// The three are distinct, and their shapes fit: sums [m][n], x [m][k], w [k][n].
static inline void tile_require_product(int sums, int x, int w) {
    tile_require_usable(sums);
    tile_require_usable(x);
    tile_require_usable(w);
    const TileShapes *s = &tiles.shapes;
    tile_require(sums != x && sums != w && x != w);
    tile_require((s->row_bytes[sums] | s->row_bytes[x] | s->row_bytes[w]) % 4 == 0);
    tile_require(s->rows[sums] == s->rows[x] && s->row_bytes[sums] == s->row_bytes[w]);
    tile_require(s->row_bytes[x] == s->rows[w] * 4);
}

static inline float tile_number(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline float flush_denormal(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7f800000 ? x : tile_number(bits & 0x80000000);
}

static inline void tile_dot_bf16(int sums, int x, int w) {
    tile_require_product(sums, x, w);
    const int steps = tiles.shapes.rows[w], columns = tiles.shapes.row_bytes[sums] / 4;
    for (int row = 0; row < tiles.shapes.rows[sums]; row++) {
        float apart[2][TILE_BYTES / 4] = {0};
        for (int step = 0; step < steps; step++)
            for (int column = 0; column < columns; column++) {
                uint32_t a, b;
                memcpy(&a, tiles.data[x][row] + step * 4, sizeof a);
                memcpy(&b, tiles.data[w][step] + column * 4, sizeof b);
                for (int odd = 0; odd < 2; odd++) {
                    const float from_x = flush_denormal(tile_number(odd ? a & 0xffff0000 : a << 16));
                    const float from_w = flush_denormal(tile_number(odd ? b & 0xffff0000 : b << 16));
                    float *sum = &apart[odd][column];
                    *sum = flush_denormal(__builtin_fmaf(from_x, from_w, *sum));
                }
            }
        for (int column = 0; column < columns; column++) {
            float sum;
            uint8_t *place = tiles.data[sums][row] + column * 4;
            memcpy(&sum, place, sizeof sum);
            sum = flush_denormal(flush_denormal(sum) + flush_denormal(apart[0][column] + apart[1][column]));
            memcpy(place, &sum, sizeof sum);
        }
    }
}

static inline void tile_dot_int8(int sums, int x, int w) {
    tile_require_product(sums, x, w);
    const int steps = tiles.shapes.rows[w], columns = tiles.shapes.row_bytes[sums] / 4;
    for (int row = 0; row < tiles.shapes.rows[sums]; row++)
        for (int column = 0; column < columns; column++) {
            int32_t sum;
            uint8_t *place = tiles.data[sums][row] + column * 4;
            memcpy(&sum, place, sizeof sum);
            for (int step = 0; step < steps; step++)
                for (int i = 0; i < 4; i++)
                    sum += (int8_t)tiles.data[x][row][step * 4 + i] * tiles.data[w][step][column * 4 + i];
            memcpy(place, &sum, sizeof sum);
        }
}
