// Products of up to MAX_ROWS rows of activations with a matrix, which is read once.
//
// Weights keep PyTorch's layout [rows, columns]. The sums of a row of activations are added in an order that does not
// depend on the number of rows.
#pragma once
#include "vectors.h"

#ifdef __AMX_TILE__
#include "amx.h"
#endif

// Activations in the form that `project` needs.
typedef struct {
    int64_t rows, columns;
    int64_t width; // columns, padded with zeros to a multiple of 32
    int tiles;     // whether `data` has the form of amx.h
    void *data;    // else float [rows, width]
    float scales[MAX_ROWS];
} Packed;

// Whether AMX computes the products with `count` matrices of equal format. It rounds activations to bfloat16 or to 16
// bits of fixed point; `exact`: activations must stay float32.
INLINE int uses_tiles(const Matrix *const *matrices, int count, int exact) {
#ifdef __AMX_TILE__
    if (exact || !amx_available()) return 0;
    for (int i = 0; i < count; i++)
        if (!amx_supports(matrices[i])) return 0;
    return 1;
#else
    return (void)matrices, (void)count, (void)exact, 0;
#endif
}

// Converts activations `x` [rows, columns] for products with matrices of the format `dtype`. Products with bfloat16
// weights round activations to bfloat16, as PyTorch does.
static void pack(const float *x, int64_t rows, int64_t columns, int64_t dtype, int tiles, Packed *out) {
    out->rows = rows, out->columns = columns, out->tiles = tiles, out->width = (columns + 31) / 32 * 32;
#ifdef __AMX_TILE__
    if (tiles) {
        if (dtype == BFLOAT16) amx_pack_bfloat16(x, rows, columns, out->data);
        else amx_pack_int8(x, rows, columns, out->data, out->scales);
        return;
    }
#endif
    for (int64_t t = 0; t < rows; t++) {
        float *row = (float *)out->data + t * out->width;
        const float *from = x + t * columns;
        if (dtype == BFLOAT16)
            for (int64_t k = 0; k < columns; k++) row[k] = from_bfloat16(to_bfloat16(from[k]));
        else memcpy(row, from, columns * sizeof(float));
        memset(row + columns, 0, (out->width - columns) * sizeof(float));
    }
}

INLINE vec load_weights(const void *row, int64_t dtype, int64_t k) {
    if (dtype == FLOAT32) return load((const float *)row + k);
    if (dtype == BFLOAT16) return load_bfloat16((const uint16_t *)row + k);
    return load_int8((const int8_t *)row + k);
}

// The same for the last, incomplete vector of a row.
INLINE vec load_last_weights(const void *row, int64_t dtype, int64_t k, int64_t columns) {
    const int size = dtype == FLOAT32 ? 4 : dtype == BFLOAT16 ? 2 : 1;
    char padded[4 * LANES] = {0};
    memcpy(padded, (const char *)row + k * size, (columns - k) * size);
    return load_weights(padded, dtype, 0);
}

// Converts the low or the high nibbles of LANES bytes; a nibble is an integer + 8.
INLINE vec load_nibbles(const uint8_t *p, int high) {
#ifdef __AVX512F__
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    const ivec nibbles = (ivec)(high ? _mm512_srli_epi32(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
#else
    ivec nibbles;
    for (int i = 0; i < LANES; i++) nibbles[i] = high ? p[i] >> 4 : p[i] & 15;
#endif
    return __builtin_convertvector(nibbles - 8, vec);
}

// Adds the products with a group of 32 columns of an INT4 row.
INLINE void add_int4(const uint8_t *group, float scale, const float *const x[], int count, vec *sums) {
    vec part[4] = {};
#pragma GCC unroll 4
    for (int k = 0; k < 32; k += LANES) {
        const vec w = load_nibbles(group + k % 16, k / 16);
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) part[r] += w * load(x[r] + k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) sums[r] += part[r] * scale;
}

// Computes LANES products: of `count` rows of activations and LANES / count rows of the matrix.
INLINE void dot(const Matrix *m, int64_t dtype, const int64_t *n, const float *const x[], int count, float *out) {
    const int many = LANES / count;
    vec sums[LANES] = {};
    const void *row[LANES];
    const int64_t columns = m->columns, even = columns / LANES * LANES, groups = (columns + 31) / 32;
    const int64_t stride = dtype == FLOAT32 ? 4 * columns : dtype == BFLOAT16 ? 2 * columns : columns;
    for (int i = 0; i < many; i++) row[i] = (const char *)m->data + n[i] * (dtype == INT4 ? 16 * groups : stride);
    if (dtype == INT4) {
        for (int64_t g = 0; g < groups; g++) {
            const float *at[4];
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) at[r] = x[r] + 32 * g;
#pragma GCC unroll 16
            for (int i = 0; i < many; i++) {
                const float scale = from_bfloat16(((const uint16_t *)m->scale)[n[i] * groups + g]);
                add_int4((const uint8_t *)row[i] + 16 * g, scale, at, count, sums + i * count);
            }
        }
    } else {
        for (int64_t k = 0; k < even; k += LANES) {
            vec v[4];
#pragma GCC unroll 4
            for (int r = 0; r < count; r++) v[r] = load(x[r] + k);
#pragma GCC unroll 16
            for (int i = 0; i < many; i++) {
                const vec w = load_weights(row[i], dtype, k);
#pragma GCC unroll 4
                for (int r = 0; r < count; r++) sums[i * count + r] += w * v[r];
            }
        }
        if (even < columns)
            for (int i = 0; i < many; i++) {
                const vec w = load_last_weights(row[i], dtype, even, columns);
                for (int r = 0; r < count; r++) sums[i * count + r] += w * load(x[r] + even);
            }
    }
    store(out, sums_of(sums));
}

// Computes out[t, n - begin] for n in [begin, end), with `count` rows of activations at a time.
INLINE void dots(const Matrix *m, int64_t dtype, const Packed *in, int64_t t, int count, int64_t begin, int64_t end,
                 float *out, int64_t ld) {
    const int many = LANES / count;
    const float *x[4];
    for (int r = 0; r < count; r++) x[r] = (const float *)in->data + (t + r < in->rows ? t + r : t) * in->width;
    for (int64_t first = begin; first < end; first += many) {
        int64_t n[LANES];
        float found[LANES];
        for (int i = 0; i < many; i++) n[i] = first + i < end ? first + i : end - 1;
        dot(m, dtype, n, x, count, found);
        for (int i = 0; i < many && first + i < end; i++) {
            const float scale = dtype == INT8 ? from_bfloat16(((const uint16_t *)m->scale)[n[i]]) : 1.0f;
            for (int r = 0; r < count && t + r < in->rows; r++)
                out[(t + r) * ld + n[i] - begin] = found[i * count + r] * scale;
        }
    }
}

INLINE void project_rows(const Matrix *m, int64_t dtype, const Packed *in, int64_t begin, int64_t end, float *out,
                         int64_t ld) {
    for (int64_t t = 0; t < in->rows;) {
        const int64_t left = in->rows - t;
        if (left >= 3) dots(m, dtype, in, t, 4, begin, end, out, ld), t += 4;
        else if (left == 2) dots(m, dtype, in, t, 2, begin, end, out, ld), t += 2;
        else dots(m, dtype, in, t, 1, begin, end, out, ld), t += 1;
    }
}

// Computes the outputs [begin, end) of a linear layer: out[t, n - begin] = in[t] . m[n] + bias[n].
static void project(const Matrix *m, const Packed *in, int64_t begin, int64_t end, float *out, int64_t ld) {
#ifdef __AMX_TILE__
    if (in->tiles) amx_project(m, in->data, in->scales, in->rows, begin, end, out, ld);
    else
#endif
    if (m->dtype == FLOAT32) project_rows(m, FLOAT32, in, begin, end, out, ld);
    else if (m->dtype == BFLOAT16) project_rows(m, BFLOAT16, in, begin, end, out, ld);
    else if (m->dtype == INT8) project_rows(m, INT8, in, begin, end, out, ld);
    else project_rows(m, INT4, in, begin, end, out, ld);
    if (m->bias.data)
        for (int64_t t = 0; t < in->rows; t++)
            for (int64_t n = begin; n < end; n++)
                out[t * ld + n - begin] += element(m->bias.data, m->bias.dtype, n);
}
