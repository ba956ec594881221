// What the parts of attention share: the problem, a task of it, and the softmax over a tile of keys.
#pragma once
#include "kv_numbers.h"

#define TILE 64       // keys between two rescalings of the softmax
#define MAX_ROWS 64   // queries x heads that share a KV head, in one task
#define MAX_HEAD 256  // numbers of a head

typedef struct Attention Attention;

typedef struct {
    int64_t sequence, head, query, queries, rows, position;  // of the first query, in its sequence
    int64_t first_key, end_key;
} Work;

// Running state of the rows' softmaxes. Powers are of two: `best` is the highest score times log2 e.
typedef struct {
    float out[MAX_ROWS * MAX_HEAD], best[MAX_ROWS], total[MAX_ROWS * LANES];  // a sum of lanes
} Rows;

// Memory for one task's queries and one tile, in the form that the products of the type take.
typedef struct {
    int64_t offsets[2][TILE];  // of this tile and of the next
    float scores[MAX_ROWS * TILE], key_scales[TILE], value_scales[TILE];  // scales: of a quantised cache
    union {
        struct {
            float q[MAX_ROWS * MAX_HEAD], numbers[TILE * MAX_HEAD];
            const float *rows[TILE];
        } floats;
        struct {
            uint32_t q[MAX_ROWS * MAX_HEAD / 2], shares[MAX_ROWS * TILE / 2];
            uint32_t keys[MAX_HEAD / 2 * TILE], values[TILE / 2 * MAX_HEAD];
        } pairs;
    };
} Scratch;

// What a task does with a tile: `score` makes shares of its keys, `add` adds up its values by them.
typedef struct {
    void (*take_query)(const Attention *a, Scratch *s, int64_t row, const void *q);
    void (*score)(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets, int64_t key,
                  int64_t count);
    void (*add)(const Attention *a, const Work *w, Rows *rows, Scratch *s, const int64_t *offsets, int64_t count);
    void (*finish)(const Attention *a, float *out);  // a row
} Products;

struct Attention {
    const void *q;
    void *out;
    const char *k_cache, *v_cache;
    const int32_t *tables, *contexts, *starts;  // [S, table_width], [S], [S + 1]
    int64_t q_row, q_head, table_width, sequences, heads, kv_heads, block_size, head_size, window, type, cache_type;
    float scale, soft_cap;
    // Worked out of the above.
    int64_t group, queries_per_task, heads_per_task, parts;
    const int64_t *first_task;  // [S + 1] of each sequence, before heads and parts
    float *partial;             // [tasks, rows, head_size + 2] when keys are divided
    int64_t max_rows;
    Products products;
};

INLINE Vec capped(Vec scores, float cap) {
    const Vec e = exp_vec(scores * (2.0f / cap));
    return cap * (1.0f - 2.0f / (e + 1.0f));  // cap x tanh(score / cap)
}

// The scales of a tile's tokens, which lie behind the numbers of each block; zeros up to a whole vector.
static void take_scales(const Attention *a, const Work *w, const char *cache, int64_t key, int64_t count,
                        float *scales) {
    const int64_t numbers = a->block_size * a->head_size, tile = numbers + a->block_size * SCALE_BYTES;
    const int32_t *table = a->tables + w->sequence * a->table_width;
    int64_t block = key / a->block_size, slot = key % a->block_size;
    for (int64_t j = 0; j < count; block++, slot = 0) {
        const char *from = cache + (table[block] * a->kv_heads + w->head) * tile + numbers + slot * SCALE_BYTES;
        for (int64_t end = min_i64(count, j + a->block_size - slot); j < end; j++, from += SCALE_BYTES) {
            uint16_t half;
            memcpy(&half, from, sizeof half);
            const uint32_t bits = (uint32_t)half << 16;
            memcpy(scales + j, &bits, sizeof bits);
        }
    }
    for (int64_t j = count; j % LANES; j++)
        scales[j] = 0;
}

INLINE void take_all_scales(const Attention *a, const Work *w, Scratch *s, int64_t key, int64_t count) {
    if (!is_quantised(a->cache_type))
        return;
    take_scales(a, w, a->k_cache, key, count, s->key_scales);
    take_scales(a, w, a->v_cache, key, count, s->value_scales);
}

// Products of one row and the tile's keys become shares of the softmax so far; what came before is scaled down.
// The shares are of `type`, and in the products' place where that is float32. Keys and values are taken as they lie
// in the cache: products are multiplied by the scales of keys here, and shares by those of values.
INLINE void softmax_row(const Attention *a, const Work *w, Rows *rows, const Scratch *s, int64_t row, int64_t key,
                        int64_t count, float *scores, void *shares, int type) {
    const int quantised = is_quantised(a->cache_type);
    const int64_t position = w->position + row / a->group;
    const int64_t first = a->window ? position - a->window + 1 - key : 0;  // the visible, counted in the tile
    const int64_t end = min_i64(count, position + 1 - key);
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    const VecInt lane = lane_numbers();
    if (end <= 0 || first >= count) {
        memset(shares, 0, (size_t)(whole * size_of(type)));
        return;
    }
    const float to_log2 = 1.44269504f * (a->soft_cap > 0 ? 1.0f : a->scale);
    Vec highest = splat(-INFINITY);
    for (int64_t j = 0; j < whole; j += LANES) {
        Vec score = load_f32(scores + j);
        if (quantised)
            score *= load_f32(s->key_scales + j);
        if (a->soft_cap > 0)
            score = capped(score * a->scale, a->soft_cap);
        if (j < first || j + LANES > end) {
            const VecInt visible = (lane >= (int32_t)(first - j)) & (lane < (int32_t)(end - j));
            score = blend(visible, score, splat(-INFINITY));
        }
        highest = max_vec(score, highest);
        store_f32(scores + j, score);
    }
    float *total = rows->total + row * LANES;
    const float best = fmaxf(rows->best[row], max_lanes(highest) * to_log2);
    if (best > rows->best[row]) {
        const float factor = exp2f(rows->best[row] - best);
        store_f32(total, load_f32(total) * factor);
        for (int64_t i = 0; i < a->head_size; i += LANES)
            store_f32(rows->out + row * a->head_size + i, load_f32(rows->out + row * a->head_size + i) * factor);
        rows->best[row] = best;
    }
    Vec sum = load_f32(total);
    for (int64_t j = 0; j < whole; j += LANES) {
        const Vec share = exp2_vec(load_f32(scores + j) * to_log2 - best);
        store(shares, j, quantised ? share * load_f32(s->value_scales + j) : share, type);
        sum += quantised ? share : load(shares, j, type);  // what the values are multiplied by
    }
    store_f32(total, sum);
}
