// The numbers of a quantised KV cache, one byte each, and how they get into and out of vectors of floats.
// kv_format.py says how they lie, and what their scales are.
#pragma once
#include <immintrin.h>

#include "vec.h"

#define SCALE_BYTES 2    // of a token's head: a bfloat16
#define LEAST_SPREAD 16  // numbers that a Hadamard matrix mixes

INLINE int is_quantised(int64_t type) { return type == INT8 || type == FP8; }

// A block of one KV head.
INLINE int64_t tile_bytes(int64_t block_size, int64_t head_size, int type) {
    return block_size * (head_size * size_of(type) + (is_quantised(type) ? SCALE_BYTES : 0));
}

// As many signed bytes as a vector has lanes; the compiler would take them one by one.
INLINE VecInt load_bytes(const void *from) {
#ifdef __AVX512F__
    return (VecInt)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return (VecInt)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#endif
}

// e4m3: a sign, four bits of exponent, biased by 7, three of mantissa. Its NaN is never stored.
INLINE Vec decode(const void *base, int64_t index, int type) {
    const VecInt whole = load_bytes((const char *)base + index);
    if (type == INT8)
        return __builtin_convertvector(whole, Vec);
    const VecInt magnitude = whole & 0x7f;
    const Vec small = __builtin_convertvector(magnitude, Vec) * 0x1p-9f;  // without a leading one
    const Vec normal = (Vec)((magnitude << 20) + (120 << 23));
    return (Vec)((VecInt)blend(magnitude < 8, small, normal) | (whole & INT32_MIN));
}

// Rounds to the nearest, ties to even; `x` is within what the type holds.
INLINE VecByte encode(Vec x, int type) {
    if (type == INT8)
        return __builtin_convertvector(__builtin_convertvector(round_vec(x), VecInt), VecByte);
    const VecInt bits = (VecInt)x, magnitude = bits & INT32_MAX;
    const VecInt small = __builtin_convertvector(round_vec((Vec)magnitude * 512.0f), VecInt);
    const VecInt normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    const VecInt is_small = magnitude < 121 << 23;
    return __builtin_convertvector((small & is_small) | (normal & ~is_small) | ((bits >> 24) & 0x80), VecByte);
}

#ifdef __AVX512BF16__

// 32 numbers as bfloat16, which holds every one of them exactly.
INLINE __m512i decode_halves(const void *from, int type) {
    if (type == INT8)
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)decode(from, LANES, INT8), (__m512)decode(from, 0, INT8));
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
    const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __m512i small = _mm512_broadcast_i32x4(  // multiples of 2^-9
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small), sign);
}

#endif
