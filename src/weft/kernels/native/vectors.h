// Vectors of LANES floats in the compiler's generic vector extension, and functions of them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "types.h"

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t halves_unaligned __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
INLINE void store(float *p, vec v) { *(vec_unaligned *)p = v; }
INLINE vec splat(float x) { return (vec){} + x; }
INLINE vec select_less(vec a, vec b, vec yes, vec no) {
    const ivec mask = a < b;
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

INLINE float from_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Rounds to the nearest bfloat16, ties to even, as PyTorch does. Infinities stay; NaN stays NaN.
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vec load_bfloat16(const uint16_t *p) {
#ifdef __AVX512F__ // GCC splits the conversion
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#endif
    return (vec)(__builtin_convertvector(*(const halves_unaligned *)p, uvec) << 16);
}

INLINE vec from_int8(bytes x) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#endif
    return __builtin_convertvector(x, vec);
}

INLINE vec load_int8(const int8_t *p) { return from_int8(*(const bytes_unaligned *)p); }

// Reads element `i` of an array of FLOAT32 or BFLOAT16.
INLINE float element(const void *data, int64_t dtype, int64_t i) {
    return dtype == FLOAT32 ? ((const float *)data)[i] : from_bfloat16(((const uint16_t *)data)[i]);
}

// Converts `n` elements of an array from `begin` on to float.
INLINE void expand(const void *data, int64_t dtype, int64_t begin, int64_t n, float *out) {
    if (dtype == FLOAT32) {
        memcpy(out, (const float *)data + begin, n * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)data + begin;
    for (int64_t i = 0; i < n; i++) out[i] = from_bfloat16(from[i]);
}

INLINE float sum_of(vec v) {
    float parts[LANES];
    store(parts, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

// Adds the sums of neighbouring segments of `length` lanes of two vectors.
#if LANES == 16
#define ADD8(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
                    __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define ADD4(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define ADD2(a, b) (__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) + \
                    __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define ADD1(a, b) (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) + \
                    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#else
#define ADD4(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + \
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define ADD2(a, b) (__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + \
                    __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15))
#define ADD1(a, b) (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + \
                    __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#endif

// Returns the sums of LANES vectors: lane i has the sum of vector i.
INLINE vec sums_of(const vec v[LANES]) {
#if LANES == 16
    vec a[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = ADD8(v[2 * i], v[2 * i + 1]);
#else
    const vec *a = v;
#endif
    const vec b0 = ADD4(a[0], a[1]), b1 = ADD4(a[2], a[3]), b2 = ADD4(a[4], a[5]), b3 = ADD4(a[6], a[7]);
    return ADD1(ADD2(b0, b1), ADD2(b2, b3));
}

// e^x with a relative error of 2e-7; x is clamped to the range of normal results.
INLINE vec exp_of(vec x) {
    x = select_less(x, splat(-87.0f), splat(-87.0f), x);
    x = select_less(splat(88.0f), x, splat(88.0f), x);
    const vec magic = splat(12582912.0f); // 1.5 * 2^23: its addition rounds to an integer
    const vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691e-4f);
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((((ivec)shifted - (ivec)magic) + 127) << 23);
}

INLINE vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

// tanh x = 1 - 2 / (e^2x + 1) loses digits near 0, where the Taylor series is exact.
INLINE vec tanh_of(vec x) {
    const vec square = x * x;
    const vec far = 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f);
    const vec near = x * (1.0f + square * (-0.33333333f + square * (0.13333333f - square * 0.05396825f)));
    return select_less(square, splat(0.04f), near, far);
}

// erf x by formula 7.1.26 of Abramowitz and Stegun, with an absolute error of 1.5e-7.
INLINE vec erf_of(vec x) {
    const vec size = select_less(x, splat(0.0f), -x, x);
    const vec t = 1.0f / (1.0f + 0.3275911f * size);
    const vec p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const vec found = 1.0f - p * exp_of(-x * x);
    return select_less(x, splat(0.0f), -found, found);
}

INLINE vec activate(vec x, int64_t kind) {
    const vec positive = select_less(x, splat(0.0f), splat(0.0f), x);
    switch (kind) {
    case SILU: return x * sigmoid_of(x);
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
    case RELU: return positive;
    default: return positive * positive;
    }
}
