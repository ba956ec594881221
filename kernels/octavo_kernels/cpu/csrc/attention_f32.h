// The inner products of attention in float32; with AVX2 bfloat16 too, and quantised caches, converted.
#pragma once
#include "attention.h"

// Products of one query with as many keys as a vector has lanes; of `keys`, some may be the same.
INLINE Vec score_lanes(const float *q, const float *const *keys, int64_t head_size) {
    Vec sums[LANES];
    for (int half = 0; half < LANES; half += 8) {  // 8 pointers and 8 sums stay in registers
        Vec *s = sums + half;
        const float *const *k = keys + half;
        for (int j = 0; j < 8; j++)
            s[j] = (Vec){0};
        for (int64_t i = 0; i < head_size; i += LANES) {
            const Vec x = load_f32(q + i);
            for (int j = 0; j < 8; j++)
                s[j] += x * load_f32(k[j] + i);
        }
    }
    return sum_each(sums);
}

// out[row][0 .. LANES x chunks) += sum over keys of share[row][key] x value[key], for a few rows at once so that a
// value is loaded once for all of them.
INLINE void add_values(float *out, int64_t out_stride, const float *shares, const float *const *values,
                       int64_t offset, int64_t count, int rows, int chunks) {
    Vec sums[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < chunks; c++)
            sums[r][c] = load_f32(out + r * out_stride + c * LANES);
    for (int64_t key = 0; key < count; key++) {
        Vec v[4];
        for (int c = 0; c < chunks; c++)
            v[c] = load_f32(values[key] + offset + c * LANES);
        for (int r = 0; r < rows; r++) {
            const Vec share = splat(shares[r * TILE + key]);
            for (int c = 0; c < chunks; c++)
                sums[r][c] += share * v[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < chunks; c++)
            store_f32(out + r * out_stride + c * LANES, sums[r][c]);
}

INLINE void add_values_chunks(float *out, int64_t out_stride, const float *shares, const float *const *values,
                              int64_t offset, int64_t count, int rows, int chunks) {
    switch (chunks) {
    case 1: add_values(out, out_stride, shares, values, offset, count, rows, 1); break;
    case 2: add_values(out, out_stride, shares, values, offset, count, rows, 2); break;
    case 3: add_values(out, out_stride, shares, values, offset, count, rows, 3); break;
    default: add_values(out, out_stride, shares, values, offset, count, rows, 4);
    }
}

// The same for any number of rows, and a whole head.
static void add_all_values(float *out, int64_t head_size, const float *shares, const float *const *values,
                           int64_t count, int64_t rows) {
    for (int64_t offset = 0; offset < head_size; offset += 4 * LANES) {
        const int chunks = (int)(min_i64(head_size - offset, 4 * LANES) / LANES);
        for (int64_t row = 0; row < rows; row += 4) {
            float *o = out + row * head_size + offset;
            const float *s = shares + row * TILE;
            switch (min_i64(rows - row, 4)) {
            case 1: add_values_chunks(o, head_size, s, values, offset, count, 1, chunks); break;
            case 2: add_values_chunks(o, head_size, s, values, offset, count, 2, chunks); break;
            case 3: add_values_chunks(o, head_size, s, values, offset, count, 3, chunks); break;
            default: add_values_chunks(o, head_size, s, values, offset, count, 4, chunks);
            }
        }
    }
}

INLINE void decode_row(float *to, const char *from, int64_t count, int type) {
    for (int64_t i = 0; i < count; i += LANES)
        store_f32(to + i, decode(from, i, type));
}

// Pointers to the rows as floats: as they lie in the cache, or converted into `buffer`.
static void as_floats(const Attention *a, const char *cache, const int64_t *offsets, int64_t count, float *buffer,
                      const float **rows) {
    for (int64_t j = 0; j < count; j++) {
        float *to = buffer + j * a->head_size;
        rows[j] = to;
        switch (a->cache_type) {
        case INT8: decode_row(to, cache + offsets[j], a->head_size, INT8); break;
        case FP8: decode_row(to, cache + offsets[j], a->head_size, FP8); break;
        case BF16: load_all(to, cache + offsets[j], a->head_size, BF16); break;
        default: rows[j] = (const float *)(cache + offsets[j]);
        }
    }
    for (int64_t j = count; j % LANES; j++)
        rows[j] = rows[count - 1];
}

static void take_query_f32(const Attention *a, Scratch *s, int64_t row, const void *q) {
    load_all(s->floats.q + row * a->head_size, q, a->head_size, a->type);
}

static void score_f32(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets,
                      int64_t key, int64_t count) {
    as_floats(a, a->k_cache, offsets, count, s->floats.numbers, s->floats.rows);
    take_all_scales(a, w, s, key, count);
    for (int64_t row = 0; row < w->rows; row++) {
        float *scores = s->scores + row * TILE;
        for (int64_t j = 0; j < count; j += LANES)
            store_f32(scores + j, score_lanes(s->floats.q + row * a->head_size, s->floats.rows + j, a->head_size));
        softmax_row(a, w, rows, s, row, key, count, scores, scores, F32);
    }
}

static void add_f32(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets,
                    int64_t count) {
    as_floats(a, a->v_cache, offsets, count, s->floats.numbers, s->floats.rows);
    add_all_values(rows->out, a->head_size, s->scores, s->floats.rows, count, w->rows);
}

static void finish_f32(const Attention *a, float *out) { (void)a, (void)out; }
