// Rotates a batch's queries in place, and its keys on their way into the cache; copies the values there. On the way
// both are quantised, where the cache is; queries and keys are spread before.
#include "kv_numbers.h"
#include "pool.h"
#include "vec.h"

#define TOKENS_PER_TASK 8
#define SERIAL_NUMBERS 32768
#define LARGEST_HEAD 1024

typedef struct {
    void *qkv;
    const float *cos, *sin;
    void *k_cache, *v_cache;
    const int64_t *slots;
    int64_t tokens, heads, kv_heads, head_size, block_size, type, cache_type;
} RopeStore;

// Pairs (i, i + half) of one head; `sin` has its first half negated.
INLINE void rotate(const void *from, void *to, const float *cos, const float *sin, int64_t half, int type,
                   int to_type) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Vec a = load(from, i, type), b = load(from, half + i, type);
        store(to, i, a * load_f32(cos + i) + b * load_f32(sin + i), to_type);
        store(to, half + i, b * load_f32(cos + half + i) + a * load_f32(sin + half + i), to_type);
    }
    if (i < half) {
        const int64_t n = half - i;
        Vec a = load_part(from, i, n, type), b = load_part(from, half + i, n, type);
        Vec first = a * load_part(cos, i, n, F32) + b * load_part(sin, i, n, F32);
        Vec second = b * load_part(cos, half + i, n, F32) + a * load_part(sin, half + i, n, F32);
        store_part(to, i, n, first, to_type);
        store_part(to, half + i, n, second, to_type);
    }
}

// `kv_format.spread`: a head times a Hadamard matrix. Within a vector each number is added with its row's signs; beyond,
// vectors are added and subtracted.
INLINE void spread(float *x, int64_t size) {
    if (size < LEAST_SPREAD || (size & (size - 1)))
        return;
    const VecInt lane = lane_numbers();
    const float scale = 1.0f / sqrtf((float)size);
    for (int64_t begin = 0; begin < size; begin += LANES) {
        Vec sum = {0};
        for (int i = 0; i < LANES; i++) {
            VecInt odd = lane & i;
            odd ^= odd >> 2;
            odd ^= odd >> 1;  // the last bit: whether an odd number of the others are set
            sum += (Vec)((VecInt)splat(x[begin + i]) ^ (odd << 31));
        }
        store_f32(x + begin, sum * scale);
    }
    for (int64_t stride = LANES; stride < size; stride *= 2)
        for (int64_t begin = 0; begin < size; begin += 2 * stride)
            for (float *p = x + begin; p < x + begin + stride; p += LANES) {
                const Vec a = load_f32(p), b = load_f32(p + stride);
                store_f32(p, a + b);
                store_f32(p + stride, a - b);
            }
}

INLINE void rotate_and_spread(const void *from, float *to, const float *cos, const float *sin, int64_t size, int type) {
    rotate(from, to, cos, sin, size / 2, type, F32);
    spread(to, size);
}

// One token's head, in slot `slot` of a tile. A NaN, as an integer, is above all numbers.
INLINE void quantise(const void *x, char *tile, int64_t slot, int64_t block_size, int64_t size, int type,
                     int cache_type) {
    VecInt largest = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const VecInt bits = (VecInt)load_up_to(x, i, size - i, type) & INT32_MAX;
        largest = (VecInt)blend(bits > largest, (Vec)bits, (Vec)largest);
    }
    float scale;
    const int32_t most = max_lanes_int(largest);
    memcpy(&scale, &most, sizeof scale);
    scale /= cache_type == INT8 ? 127.0f : 448.0f;
    const VecHalf half = narrow(splat(scale < 1e-30f ? 1e-30f : scale));
    memcpy(tile + block_size * size + slot * SCALE_BYTES, &half, SCALE_BYTES);
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec ratio = load_up_to(x, i, size - i, type) / widen(half);
        const VecByte bytes = encode(blend(ratio == ratio, ratio, (Vec){0}), cache_type);
        memcpy(tile + slot * size + i, &bytes, (size_t)min_i64(LANES, size - i));
    }
}

INLINE void one_token_quantised(const RopeStore *r, int64_t token, const void *k, const void *v, int type,
                                int cache_type) {
    const int64_t size = r->head_size, block = r->slots[token] / r->block_size, slot = r->slots[token] % r->block_size;
    const float *cos = r->cos + token * size, *sin = r->sin + token * size;
    for (int64_t head = 0; head < r->kv_heads; head++) {
        const int64_t tile = (block * r->kv_heads + head) * tile_bytes(r->block_size, size, cache_type);
        float key[LARGEST_HEAD];
        rotate_and_spread(at(k, head * size, type), key, cos, sin, size, type);
        quantise(key, (char *)r->k_cache + tile, slot, r->block_size, size, F32, cache_type);
        quantise(at(v, head * size, type), (char *)r->v_cache + tile, slot, r->block_size, size, type, cache_type);
    }
}

INLINE void one_token(const RopeStore *r, int64_t token, int type) {
    const int64_t size = r->head_size, width = (r->heads + 2 * r->kv_heads) * size;
    const float *cos = r->cos + token * size, *sin = r->sin + token * size;
    void *q = at_mut(r->qkv, token * width, type);
    for (int64_t head = 0; head < r->heads; head++) {
        void *x = at_mut(q, head * size, type);
        if (is_quantised(r->cache_type)) {
            float query[LARGEST_HEAD];
            rotate_and_spread(x, query, cos, sin, size, type);
            store_all(x, query, size, type);
        } else
            rotate(x, x, cos, sin, size / 2, type, type);
    }
    const void *k = at(q, r->heads * size, type);
    const void *v = at(k, r->kv_heads * size, type);
    if (r->slots[token] < 0)
        return;
    if (is_quantised(r->cache_type)) {
        if (r->cache_type == INT8)
            one_token_quantised(r, token, k, v, type, INT8);
        else
            one_token_quantised(r, token, k, v, type, FP8);
        return;
    }
    const int64_t block = r->slots[token] / r->block_size, offset = r->slots[token] % r->block_size;
    for (int64_t head = 0; head < r->kv_heads; head++) {
        const int64_t to = ((block * r->kv_heads + head) * r->block_size + offset) * size;
        rotate(at(k, head * size, type), at_mut(r->k_cache, to, type), cos, sin, size / 2, type, type);
        memcpy(at_mut(r->v_cache, to, type), at(v, head * size, type), (size_t)(size * size_of(type)));
    }
}

static void rope_store_task(void *context, int64_t index) {
    const RopeStore *r = context;
    const int64_t end = min_i64(r->tokens, (index + 1) * TOKENS_PER_TASK);
    for (int64_t token = index * TOKENS_PER_TASK; token < end; token++) {
        if (r->type == BF16)
            one_token(r, token, BF16);
        else
            one_token(r, token, F32);
    }
}

// qkv [tokens, heads + 2 kv_heads, head_size]; cos, sin [tokens, head_size]; slots [tokens], below 0 to store nothing;
// caches [blocks, kv_heads, block_size, head_size] of `type`, or quantised.
EXPORT void octavo_rope_store(void *qkv, const float *cos, const float *sin, void *k_cache, void *v_cache,
                              const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                              int64_t head_size, int64_t block_size, int64_t type, int64_t cache_type,
                              int64_t threads) {
    RopeStore r = {qkv,      cos,       sin,        k_cache, v_cache,   slots, tokens, heads,
                   kv_heads, head_size, block_size, type,    cache_type};
    const int64_t tasks = (tokens + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK;
    const int64_t numbers = tokens * (heads + 2 * kv_heads) * head_size;
    parallel_for(numbers < SERIAL_NUMBERS ? 1 : threads, tasks, rope_store_task, &r);
}
