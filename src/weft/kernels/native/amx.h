// Products on the matrix unit (AMX) of Intel processors: 16 rows of weights times up to 16 columns, which are rows of
// activations. bfloat16 weights are multiplied with activations in bfloat16. int8 weights are multiplied with
// activations in 16 bits of fixed point, 256 * high + low, where high and low are a column each.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

#define STRIPE 32 // rows of the matrix that are computed at once

// GCC does not know which memory the tile instructions read and write.
#define ORDER __asm__ volatile("" ::: "memory")

// Requests the permission to use the tile registers, which Linux gives to processes.
static int amx_available(void) {
    static int available = -1;
    if (available < 0) available = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return available;
}

INLINE int amx_supports(const Matrix *m) {
    return m->rows >= STRIPE && ((m->dtype == BFLOAT16 && m->columns >= 32) || (m->dtype == INT8 && m->columns >= 64));
}

// Columns in all, and in one group of columns.
INLINE int amx_columns(int64_t rows, int64_t dtype) { return (int)(dtype == INT8 ? 2 * rows : rows); }
INLINE int amx_width(int columns) { return columns < 16 ? columns : 16; }

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig __attribute__((aligned(64)));

// Tiles 0 to 3: results. 4, 5: weights. 6, 7: activations.
static void amx_configure(int width) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.rows[i] = 16, config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 64 : 4 * width);
    ORDER;
    _tile_loadconfig(&config);
}

// Transposes 16 x 16 elements of 32 bits.
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// The last tile of a row of `columns` columns ends at the row's end. It overlaps the tile before, whose columns are
// zeros in the activations of the last tile.
INLINE int64_t tile_begin(int64_t tile, int64_t depth, int64_t columns) {
    return (tile + 1) * depth > columns ? columns - depth : tile * depth;
}

// Stores 16 rows of 64 bytes as the columns of a tile: [16, width].
INLINE void store_columns(__m512i r[16], int width, uint32_t *out) {
    const __mmask16 mask = (__mmask16)((1u << width) - 1);
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(out + i * width, mask, r[i]);
}

// Loads activations of 16 columns from `k` on; those before `from` are 0.
INLINE __m512 load_from(const float *x, int64_t k, int64_t from) {
    const int64_t skipped = from - k;
    if (skipped <= 0) return _mm512_loadu_ps(x + k);
    if (skipped >= 16) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps((__mmask16)(0xffff << skipped), x + k);
}

// Packs activations [rows, columns] as [groups of columns, tiles, 16, width] pairs of bfloat16, and configures the tiles
// for products with them.
static void amx_pack_bfloat16(const float *x, int64_t rows, int64_t columns, uint32_t *out) {
    const int width = amx_width(amx_columns(rows, BFLOAT16));
    amx_configure(width);
    const int64_t tiles = (columns + 31) / 32;
    for (int64_t group = 0; group < rows; group += 16)
        for (int64_t tile = 0; tile < tiles; tile++, out += 16 * width) {
            const int64_t k = tile_begin(tile, 32, columns), from = tile * 32;
            __m512i r[16];
            for (int t = 0; t < 16; t++) {
                r[t] = _mm512_setzero_si512();
                if (group + t >= rows) continue;
                const float *row = x + (group + t) * columns;
                r[t] = (__m512i)_mm512_cvtne2ps_pbh(load_from(row, k + 16, from), load_from(row, k, from));
            }
            store_columns(r, width, out);
        }
}

// Packs activations [rows, columns] as [groups of columns, tiles, 16, width] quadruples of int8.
// Configures the tiles.
static void amx_pack_int8(const float *x, int64_t rows, int64_t columns, uint32_t *out, float *scales) {
    const int width = amx_width(amx_columns(rows, INT8));
    const int64_t tiles = (columns + 63) / 64;
    amx_configure(width);
    for (int64_t t = 0; t < rows; t++) {
        vec most = {}, poison = {}; // NaN if the row has NaN or infinity
        for (int64_t k = 0; k < columns; k += LANES) {
            const int64_t at = k + LANES <= columns ? k : columns - LANES;
            const vec v = load(x + t * columns + at), size = select_less(v, splat(0.0f), -v, v);
            most = select_less(most, size, size, most), poison += v * 0.0f;
        }
        float largest = sum_of(poison);
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest; // false if NaN
        scales[t] = largest / 32639.0f; // 127 * 256 + 127
    }
    for (int64_t group = 0; group < rows; group += 8)
        for (int64_t tile = 0; tile < tiles; tile++, out += 16 * width) {
            const int64_t k = tile_begin(tile, 64, columns), from = tile * 64;
            __m512i r[16];
            for (int t = 0; t < 8; t++) {
                r[2 * t] = r[2 * t + 1] = _mm512_setzero_si512();
                if (group + t >= rows || scales[group + t] == 0) continue;
                const __m512 inverse = _mm512_set1_ps(1.0f / scales[group + t]);
                int8_t high[64], low[64];
                for (int i = 0; i < 64; i += 16) {
                    const __m512 v = load_from(x + (group + t) * columns, k + i, from);
                    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
                    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
                    _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(whole));
                    _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(upper));
                }
                r[2 * t] = _mm512_loadu_si512(high), r[2 * t + 1] = _mm512_loadu_si512(low);
            }
            store_columns(r, width, out);
        }
}

#define MULTIPLY(to, weights, columns) \
    do { \
        if (dtype == BFLOAT16) _tile_dpbf16ps(to, weights, columns); \
        else _tile_dpbssd(to, weights, columns); \
    } while (0)

// Computes STRIPE rows of a matrix, from `n` on, times one or two groups of columns.
INLINE void amx_stripe(const Matrix *m, int64_t dtype, int64_t n, const uint32_t *in, int width, int two,
                       uint32_t (*out)[16 * 16]) {
    const int64_t depth = dtype == BFLOAT16 ? 32 : 64, size = 64 / depth, stride = m->columns * size;
    const int64_t tiles = (m->columns + depth - 1) / depth;
    const char *first = (const char *)m->data + n * stride, *second = first + 16 * stride;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t at = tile_begin(tile, depth, m->columns) * size;
        const uint32_t *columns = in + tile * 16 * width;
        _tile_loadd(6, columns, 4 * width);
        _tile_loadd(4, first + at, stride);
        _tile_loadd(5, second + at, stride);
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 5, 6);
        if (two) {
            _tile_loadd(7, columns + tiles * 16 * width, 4 * width);
            MULTIPLY(2, 4, 7);
            MULTIPLY(3, 5, 7);
        }
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    if (two) {
        _tile_stored(2, out[2], 64);
        _tile_stored(3, out[3], 64);
    }
    ORDER;
}

// Writes 16 results of each row of activations of a group of columns: out[t, i] for i in [skipped, 16).
INLINE void amx_write(const Matrix *m, int64_t dtype, uint32_t *tile, int64_t n, int skipped, const float *scales,
                      int64_t rows, float *out, int64_t ld) {
    const __mmask16 mask = (__mmask16)(0xffff << skipped);
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(tile + 16 * i);
    transpose(r);
    if (dtype == BFLOAT16) {
        for (int64_t t = 0; t < rows; t++) _mm512_mask_storeu_ps(out + t * ld, mask, (__m512)r[t]);
        return;
    }
    const __m256i halves = _mm256_loadu_si256((const void *)((const uint16_t *)m->scale + n));
    const __m512 scale = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    for (int64_t t = 0; t < rows; t++) {
        const __m512 high = _mm512_cvtepi32_ps(r[2 * t]), low = _mm512_cvtepi32_ps(r[2 * t + 1]);
        const __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
        const __m512 found = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(scales[t]));
        _mm512_mask_storeu_ps(out + t * ld, mask, found);
    }
}

INLINE void amx_project_as(const Matrix *m, int64_t dtype, const uint32_t *in, const float *scales, int64_t rows,
                           int64_t begin, int64_t end, float *out, int64_t ld) {
    const int width = amx_width(amx_columns(rows, dtype)), share = dtype == BFLOAT16 ? 16 : 8; // rows in a group
    const int64_t depth = dtype == BFLOAT16 ? 32 : 64, size = (m->columns + depth - 1) / depth * 16 * width;
    uint32_t tiles[4][16 * 16] __attribute__((aligned(64)));
    ORDER;
    for (int64_t first = begin; first < end; first += STRIPE) {
        const int64_t n = first + STRIPE <= m->rows ? first : m->rows - STRIPE; // the last stripe overlaps another
        for (int64_t t = 0; t < rows; t += 2 * share) {
            const int two = rows - t > share;
            if (two) amx_stripe(m, dtype, n, in + t / share * size, width, 1, tiles);
            else amx_stripe(m, dtype, n, in + t / share * size, width, 0, tiles);
            for (int i = 0; i < (two ? 4 : 2); i++) {
                const int64_t row = t + i / 2 * share, at = n + 16 * (i % 2), skipped = first - at;
                const int64_t many = rows - row < share ? rows - row : share;
                if (skipped < 16)
                    amx_write(m, dtype, tiles[i], at, skipped > 0 ? (int)skipped : 0, scales + row, many,
                              out + row * ld + at - begin, ld);
            }
        }
    }
}

static void amx_project(const Matrix *m, const void *in, const float *scales, int64_t rows, int64_t begin, int64_t end,
                        float *out, int64_t ld) {
    if (m->dtype == BFLOAT16) amx_project_as(m, BFLOAT16, in, scales, rows, begin, end, out, ld);
    else amx_project_as(m, INT8, in, scales, rows, begin, end, out, ld);
}
