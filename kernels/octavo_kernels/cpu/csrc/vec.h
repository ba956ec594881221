// Vectors of floats, one register each, and how numbers of either type get into and out of them.
//
// Written with the compiler's vector extension: 16 lanes with AVX-512, 8 with AVX2, since what is wider than a
// register GCC keeps in memory and compares lane by lane, which takes seven times as long. Pointers need no
// alignment; every access goes through memcpy, which compiles to one unaligned move.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * LANES)));
typedef int8_t VecByte __attribute__((vector_size(LANES)));

// Element types, as Python passes them. Functions take the type as an argument that is constant once they are
// inlined, so each type gets its own code.
enum { F32 = 0, BF16 = 1, INT8 = 2, FP8 = 3 };

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t size_of(int type) { return type == F32 ? 4 : type == BF16 ? 2 : 1; }
INLINE const void *at(const void *base, int64_t index, int type) { return (const char *)base + index * size_of(type); }
INLINE void *at_mut(void *base, int64_t index, int type) { return (char *)base + index * size_of(type); }

// Into the second-level cache: the first takes too few lines at a time to keep the memory busy.
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

INLINE Vec splat(float x) { return x - (Vec){0}; }

// 0, 1, 2 ...
INLINE VecInt lane_numbers(void) {
    int32_t numbers[LANES];
    for (int lane = 0; lane < LANES; lane++)
        numbers[lane] = lane;
    VecInt v;
    memcpy(&v, numbers, sizeof v);
    return v;
}

INLINE Vec load_f32(const float *p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(float *p, Vec v) { memcpy(p, &v, sizeof v); }

INLINE Vec widen(VecHalf half) {
#ifdef __AVX512F__  // in two instructions, which the compiler does not find
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (Vec)(__builtin_convertvector(half, VecBits) << 16);
#endif
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays one, whatever its payload.
INLINE VecHalf narrow(Vec v) {
#ifdef __AVX512BF16__
    return (VecHalf)_mm512_cvtneps_pbh((__m512)v);
#else
    VecBits bits = (VecBits)v;
    VecBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    VecBits is_nan = (VecBits)(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), VecHalf);
#endif
}

INLINE Vec load(const void *base, int64_t index, int type) {
    if (type == F32)
        return load_f32((const float *)base + index);
    VecHalf half;
    memcpy(&half, (const uint16_t *)base + index, sizeof half);
    return widen(half);
}

INLINE void store(void *base, int64_t index, Vec v, int type) {
    if (type == F32) {
        store_f32((float *)base + index, v);
        return;
    }
    VecHalf half = narrow(v);
    memcpy((uint16_t *)base + index, &half, sizeof half);
}

// Whole vectors of either type as floats, and back: what runs once a row or a tile needs no code per type.
INLINE void load_all(float *to, const void *from, int64_t count, int64_t type) {
    if (type == BF16)
        for (int64_t i = 0; i < count; i += LANES)
            store_f32(to + i, load(from, i, BF16));
    else
        memcpy(to, from, (size_t)count * sizeof *to);
}

// The first `count` numbers, and zeros after them; for the end of a row. `count` is below LANES.
INLINE Vec load_part(const void *base, int64_t index, int64_t count, int type) {
    char buffer[64] = {0};
    memcpy(buffer, at(base, index, type), (size_t)(count * size_of(type)));
    return load(buffer, 0, type);
}

INLINE Vec load_up_to(const void *base, int64_t index, int64_t count, int type) {
    return count >= LANES ? load(base, index, type) : load_part(base, index, count, type);
}

INLINE void store_part(void *base, int64_t index, int64_t count, Vec v, int type) {
    char buffer[64];
    store(buffer, 0, v, type);
    memcpy(at_mut(base, index, type), buffer, (size_t)(count * size_of(type)));
}

INLINE void store_all(void *to, const float *from, int64_t count, int type) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to, i, load_f32(from + i), type);
    if (i < count)
        store_part(to, i, count - i, load_part(from, i, count - i, F32), type);
}

INLINE Vec blend(VecInt mask, Vec yes, Vec no) { return (Vec)(((VecInt)yes & mask) | ((VecInt)no & ~mask)); }
// The second argument where either is a NaN, as maxps does.
INLINE Vec max_vec(Vec a, Vec b) { return blend(a > b, a, b); }
INLINE Vec min_vec(Vec a, Vec b) { return blend(a < b, a, b); }

INLINE float sum_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[LANES];
    store_f32(lanes, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

INLINE float max_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lanes[LANES];
    store_f32(lanes, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

INLINE int32_t max_lanes_int(VecInt v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// The sums of LANES vectors' lanes, as one vector: with shuffles that do four sums at once.
INLINE Vec sum_each(const Vec v[LANES]) {
#ifdef __AVX512F__
    __m512 pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; i++) {
        __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    for (int i = 0; i < 2; i++) {
        __m512 a = fours[2 * i], b = fours[2 * i + 1];
        halves[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    return (Vec)(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88) +
                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
    float sums[LANES];
    for (int i = 0; i < LANES; i++)
        sums[i] = sum_lanes(v[i]);
    return load_f32(sums);
#endif
}

// p times 2 to the n, where n is an integer.
INLINE Vec times_power(Vec p, Vec n) {
#ifdef __AVX512F__
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // In two steps, since 2^n alone may be beyond what a float holds.
    const VecInt whole = __builtin_convertvector(n, VecInt), half = whole >> 1;
    return p * (Vec)((half + 127) << 23) * (Vec)((whole - half + 127) << 23);
#endif
}

INLINE Vec round_vec(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer, where x is below 2^22
    return (x + magic) - magic;
}

// e to the x, within 2 units in the last place: 2^n times a polynomial of the rest in [-ln 2 / 2, ln 2 / 2]
// (coefficients of Cephes' expf). Far below -87 it is 0, above 88.7 infinite; a NaN stays one.
INLINE Vec exp_vec(Vec x) {
    // Of two numbers one of which is a NaN, these take the second.
    const Vec clamped = min_vec(splat(89.0f), max_vec(splat(-105.0f), x));
    const Vec n = round_vec(clamped * 1.44269504f);
    Vec r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return times_power(p * (r * r) + r + 1.0f, n);
}

// 2 to the x for x up to 0, in the same way (coefficients of Cephes' exp2f).
INLINE Vec exp2_vec(Vec x) {
    const Vec clamped = max_vec(splat(-151.0f), x), n = round_vec(clamped), r = clamped - n;
    Vec p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    return times_power(p * r + 1.0f, n);
}

// One bit for each lane of a comparison's result.
INLINE uint32_t lanes_of(VecInt mask) {
#ifdef __AVX512F__
    return _mm512_movepi32_mask((__m512i)mask);
#else
    uint32_t lanes = 0;
    for (int i = 0; i < LANES; i += 8) {
        __m256 part;
        memcpy(&part, (const char *)&mask + i * sizeof(float), sizeof part);
        lanes |= (uint32_t)_mm256_movemask_ps(part) << i;
    }
    return lanes;
#endif
}
