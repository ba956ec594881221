// The inner products of attention in bfloat16: a tile of keys and one of values are put into the order in which
// vdpbf16ps multiplies them, once for all rows of a task, straight from the cache.
#pragma once
#include "attention.h"

#ifdef __AVX512BF16__

#define PAIRS 32     // bfloat16 of a register
#define MAX_BLOCK 6  // rows at once: with four registers of values, 24 sums

INLINE __m512i load_512(const void *p) { return _mm512_loadu_si512(p); }

// 16 rows of 16 words become 16 columns: four rounds of exchanges, each over twice the distance.
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + j + 2]);
            r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + j + 2]);
        }
    for (int i = 0; i < 4; i++)  // r[i], r[i + 4] ... hold columns i, i + 4, i + 8, i + 12 of four rows each
        for (int j = 0; j < 2; j++) {
            t[8 * j + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + i + 4], 0x88);
            t[8 * j + i + 4] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i % 4 + (i / 4) * 4] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i % 4 + (i / 4) * 4 + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// 32 numbers of a row of the cache.
INLINE __m512i load_halves(const char *row, int64_t column, int type) {
    return type == BF16 ? load_512(row + column * 2) : decode_halves(row + column, type);
}

// The tile's rows are at `offsets` bytes in the cache; there are offsets for a multiple of 16.
INLINE void pack_keys_of(uint32_t *packed, const char *cache, const int64_t *offsets, int64_t count, int64_t head_size,
                         int type) {
    for (int64_t key = 0; key < count; key += LANES)
        for (int64_t column = 0; column < head_size; column += PAIRS) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++)
                r[i] = load_halves(cache + offsets[key + i], column, type);
            transpose(r);
            for (int i = 0; i < LANES; i++)
                _mm512_storeu_si512(packed + (column / 2 + i) * TILE + key, r[i]);
        }
}

INLINE void pack_values_of(uint32_t *packed, const char *cache, const int64_t *offsets, int64_t count,
                           int64_t head_size, int type) {
    for (int64_t key = 0; key < count; key += 2)
        for (int64_t column = 0; column < head_size; column += PAIRS) {
            const __m512i a = load_halves(cache + offsets[key], column, type);
            const __m512i b =
                key + 1 < count ? load_halves(cache + offsets[key + 1], column, type) : _mm512_setzero_si512();
            uint32_t *to = packed + key / 2 * head_size + column;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(to + LANES, _mm512_unpackhi_epi16(a, b));
        }
}

static void pack_keys(const Attention *a, uint32_t *packed, const int64_t *offsets, int64_t count) {
    switch (a->cache_type) {
    case INT8: pack_keys_of(packed, a->k_cache, offsets, count, a->head_size, INT8); break;
    case FP8: pack_keys_of(packed, a->k_cache, offsets, count, a->head_size, FP8); break;
    default: pack_keys_of(packed, a->k_cache, offsets, count, a->head_size, BF16);
    }
}

static void pack_values(const Attention *a, uint32_t *packed, const int64_t *offsets, int64_t count) {
    switch (a->cache_type) {
    case INT8: pack_values_of(packed, a->v_cache, offsets, count, a->head_size, INT8); break;
    case FP8: pack_values_of(packed, a->v_cache, offsets, count, a->head_size, FP8); break;
    default: pack_values_of(packed, a->v_cache, offsets, count, a->head_size, BF16);
    }
}

// The columns of a row of sums, as `pack_values` leaves them, in their own order.
INLINE void natural_order(float *row, int64_t head_size) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t column = 0; column < head_size; column += PAIRS) {
        const __m512 a = (__m512)load_f32(row + column), b = (__m512)load_f32(row + column + LANES);
        store_f32(row + column, (Vec)_mm512_permutex2var_ps(a, low, b));
        store_f32(row + column + LANES, (Vec)_mm512_permutex2var_ps(a, high, b));
    }
}

INLINE Vec multiply_pairs(Vec sum, uint32_t every, __m512i pairs) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int32_t)every), (__m512bh)pairs);
}

// out[row][0 .. 16 x vectors) (+)= sum over pairs of left[row][pair] x right[pair][0 .. 16 x vectors).
INLINE void multiply_block(float *out, int64_t out_stride, const uint32_t *left, int64_t left_stride,
                           const uint32_t *right, int64_t right_stride, int64_t pairs, int rows, int vectors,
                           int adds) {
    Vec sums[MAX_BLOCK][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = adds ? load_f32(out + r * out_stride + v * LANES) : (Vec){0};
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i w[4];
        for (int v = 0; v < vectors; v++)
            w[v] = load_512(right + pair * right_stride + v * LANES);
        for (int r = 0; r < rows; r++) {
            const uint32_t every = left[r * left_stride + pair];
            for (int v = 0; v < vectors; v++)
                sums[r][v] = multiply_pairs(sums[r][v], every, w[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store_f32(out + r * out_stride + v * LANES, sums[r][v]);
}

// The same for any number of rows and of columns, a multiple of 32.
INLINE void multiply_all(float *out, int64_t out_stride, const uint32_t *left, int64_t left_stride,
                         const uint32_t *right, int64_t right_stride, int64_t pairs, int64_t rows, int64_t columns,
                         int adds) {
    for (int64_t row = 0; row < rows; row += MAX_BLOCK)
        for (int64_t column = 0; column < columns;) {
            const int wide = columns - column >= 4 * LANES;
            float *o = out + row * out_stride + column;
            const uint32_t *l = left + row * left_stride, *r = right + column;
#define BLOCK(rows) \
    if (wide) \
        multiply_block(o, out_stride, l, left_stride, r, right_stride, pairs, rows, 4, adds); \
    else \
        multiply_block(o, out_stride, l, left_stride, r, right_stride, pairs, rows, 2, adds); \
    break
            switch (min_i64(rows - row, MAX_BLOCK)) {
            case 1: BLOCK(1);
            case 2: BLOCK(2);
            case 3: BLOCK(3);
            case 4: BLOCK(4);
            case 5: BLOCK(5);
            default: BLOCK(6);
            }
#undef BLOCK
            column += wide ? 4 * LANES : 2 * LANES;
        }
}

static void take_query_bf16(const Attention *a, Scratch *s, int64_t row, const void *q) {
    memcpy(s->pairs.q + row * a->head_size / 2, q, (size_t)a->head_size * 2);
}

static void score_bf16(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets,
                       int64_t key, int64_t count) {
    const int64_t pairs = a->head_size / 2, whole = (count + PAIRS - 1) / PAIRS * PAIRS;
    pack_keys(a, s->pairs.keys, offsets, count);
    multiply_all(s->scores, TILE, s->pairs.q, pairs, s->pairs.keys, TILE, pairs, w->rows, whole, 0);
    take_all_scales(a, w, s, key, count);
    for (int64_t row = 0; row < w->rows; row++)
        softmax_row(a, w, rows, s, row, key, count, s->scores + row * TILE, s->pairs.shares + row * TILE / 2, BF16);
}

static void add_bf16(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets,
                     int64_t count) {
    const int64_t size = a->head_size;
    pack_values(a, s->pairs.values, offsets, count);
    multiply_all(rows->out, size, s->pairs.shares, TILE / 2, s->pairs.values, size, (count + 1) / 2, w->rows, size, 1);
}

static void finish_bf16(const Attention *a, float *out) { natural_order(out, a->head_size); }

#endif
