// What drawing from a row of logits and taking its log-probabilities share: a walk over the row by tiles, and its
// best entries in order without sorting all of them.
//
// The entries of a tile that meet in one lane of a vector are a group; finding the groups' maxima takes no work across
// lanes. At or above the n-th highest maximum lie n entries at least, so none of the n best is below it. Distances
// from the row's maximum are compared rather than logits, since buckets of floating-point numbers are the finer the
// closer to zero.
//
// A row with a NaN, or without a finite maximum, has no meaningful result; but nothing loops or is written out of
// bounds because of one: a NaN counts as near the maximum.
#pragma once
#include "vec.h"

#define TILE 256
#define BUCKETS 2048  // of distances, by their exponents and the upper 3 bits of their mantissas
#define BUCKET_SHIFT 20

typedef struct {
    const void *logits;
    int64_t size, tiles;
    float *groups;  // [tiles, LANES] their maxima
    float largest;
} Row;

INLINE int64_t tiles_of(int64_t size) { return (size + TILE - 1) / TILE; }

// A vector of the logits from `index` on, with -inf beyond the row's end.
INLINE Vec load_logits(const Row *r, int64_t index, int type) {
    const int64_t left = r->size - index;
    if (left >= LANES)
        return load(r->logits, index, type);
    if (left <= 0)
        return splat(-INFINITY);
    float logits[LANES];
    store_f32(logits, load_part(r->logits, index, left, type));
    for (int64_t lane = left; lane < LANES; lane++)
        logits[lane] = -INFINITY;
    return load_f32(logits);
}

// Which logits are no further than `distance` from the maximum, or a NaN.
INLINE VecInt is_near(const Row *r, Vec logits, float distance) { return ~(r->largest - logits > distance); }

INLINE void find_maxima(Row *r, int type) {
    Vec largest = splat(-INFINITY);
    for (int64_t tile = 0; tile < r->tiles; tile++) {
        Vec most = splat(-INFINITY);
        for (int64_t i = tile * TILE; i < (tile + 1) * TILE; i += LANES)
            most = max_vec(most, load_logits(r, i, type));
        store_f32(r->groups + tile * LANES, most);
        largest = max_vec(largest, most);
    }
    r->largest = max_lanes(largest);
}

// A distance from the maximum within which the groups' maxima amount to `wanted` or little more; infinite when all of
// them do not. `amounts` [tiles, LANES] is what each amounts to; NULL is 1 each.
static inline float distance_holding(const Row *r, const float *amounts, double wanted) {
    double sums[BUCKETS] = {0};
    for (int64_t i = 0; i < r->tiles * LANES; i++) {
        const float distance = r->largest - r->groups[i];
        uint32_t bits;
        memcpy(&bits, &distance, sizeof bits);
        sums[(bits >> BUCKET_SHIFT) % BUCKETS] += amounts ? amounts[i] : 1;
    }
    double sum = 0;
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++) {
        sum += sums[bucket];
        if (sum < wanted)
            continue;
        const uint32_t end = ((bucket + 1) << BUCKET_SHIFT) - 1;
        float distance;
        memcpy(&distance, &end, sizeof distance);
        return distance == distance ? distance : INFINITY;
    }
    return INFINITY;
}

// An entry is a number: above, a key that is the lower the higher the logit; below, the id. The lower half of a
// bfloat16's key is zero, which sorting passes over.
INLINE VecBits keys_of(Vec logits) {
    const VecBits bits = (VecBits)(logits + 0.0f), negative = (VecBits)((VecInt)bits >> 31);  // -0 becomes 0
    return (negative & bits) | (~negative & (0x80000000 - bits));
}

INLINE int64_t id_of(uint64_t entry) { return (int64_t)(entry & 0xffffffff); }

INLINE float logit_of(uint64_t entry) {
    const uint32_t key = (uint32_t)(entry >> 32), bits = key > 0x80000000 ? key : 0x80000000 - key;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

// Writes the entries within `distance` of the maximum in the row's order, and returns how many those are.
INLINE int64_t collect(const Row *r, float distance, uint64_t *entries, int type) {
    int64_t count = 0;
    for (int64_t tile = 0; tile < r->tiles; tile++) {
        if (!lanes_of(is_near(r, load_f32(r->groups + tile * LANES), distance)))
            continue;
        const int64_t end = min_i64(r->size, (tile + 1) * TILE);
        for (int64_t i = tile * TILE; i < end; i += LANES) {
            const Vec v = load_logits(r, i, type);
            uint32_t near = lanes_of(is_near(r, v, distance));
            if (end - i < LANES)
                near &= (1u << (end - i)) - 1;
            if (!near)
                continue;
            uint32_t keys[LANES];
            const VecBits all = keys_of(v);
            memcpy(keys, &all, sizeof keys);
            for (; near; near &= near - 1) {
                const int lane = __builtin_ctz(near);
                entries[count++] = (uint64_t)keys[lane] << 32 | (uint64_t)(i + lane);
            }
        }
    }
    return count;
}

// Sorts `count` entries, at least one, by their keys; those of one key stay in order. Returns where they are then:
// there, or in `spare`.
static inline uint64_t *sort_entries(uint64_t *entries, uint64_t *spare, int64_t count) {
    int32_t starts[4][256] = {0};
    for (int64_t i = 0; i < count; i++)
        for (int digit = 0; digit < 4; digit++)
            starts[digit][entries[i] >> (32 + 8 * digit) & 255]++;
    for (int digit = 0; digit < 4; digit++) {
        const int shift = 32 + 8 * digit;
        int32_t *start = starts[digit], before = 0;
        if (start[entries[0] >> shift & 255] == count)
            continue;
        for (int i = 0; i < 256; i++) {
            const int32_t here = start[i];
            start[i] = before;
            before += here;
        }
        for (int64_t i = 0; i < count; i++)
            spare[start[entries[i] >> shift & 255]++] = entries[i];
        uint64_t *sorted = spare;
        spare = entries;
        entries = sorted;
    }
    return entries;
}
