// Attention of one token per row to the paged cache.
#pragma once
#include "vectors.h"

// Floats of scratch memory that `attend` needs for `heads` query heads and `keys` keys.
INLINE int64_t attend_scratch(int64_t heads, int64_t keys, int64_t head_dim) {
    const int64_t padded = (head_dim + LANES - 1) / LANES * LANES;
    return heads * (keys + 2 * BLOCK + 2 * padded + 1) + BLOCK * padded;
}

// Rotates the pairs of dimensions (i, i + rotary_dim / 2) of a head.
static void rotate(float *x, const float *cos, const float *sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

// Writes a head's key or value of one token to the cache.
static void write_cache(const float *x, int64_t dim, void *pool, int64_t dtype, int64_t at) {
    if (dtype == FLOAT32) memcpy((float *)pool + at, x, dim * sizeof(float));
    else
        for (int64_t i = 0; i < dim; i++) ((uint16_t *)pool + at)[i] = to_bfloat16(x[i]);
}

// Index of the first element of a unit of the cache: the tokens of a block for one key/value head of a row's sequence.
// The units [0, count) of `heads` heads from `group` on follow one another in the order of the blocks' memory.
typedef struct {
    const int64_t *blocks;
    int64_t count, heads, group, block_stride, dim;
} Units;

INLINE int64_t unit_begin(const Units *u, int64_t unit) {
    unit = unit < u->count ? unit : u->count - 1;
    return u->blocks[unit / u->heads] * u->block_stride + (u->group + unit % u->heads) * u->dim;
}

// Prefetches a unit, because processors do not foresee the order of blocks.
INLINE void prefetch_unit(const Units *u, int64_t unit, const char *pool, int64_t size) {
    const int64_t at = unit_begin(u, unit), stride = u->block_stride / BLOCK;
    for (int j = 0; j < BLOCK; j++)
        for (int64_t line = 0; line < u->dim * size; line += 64)
            __builtin_prefetch(pool + (at + j * stride) * size + line);
}

// Copies the keys or values of a unit to floats [BLOCK, padded], for heads whose size is no multiple of LANES.
static void copy_unit(const Units *u, int64_t unit, const void *pool, int64_t dtype, int64_t padded, float *out) {
    const int64_t at = unit_begin(u, unit), stride = u->block_stride / BLOCK;
    for (int j = 0; j < BLOCK; j++) expand(pool, dtype, at + j * stride, u->dim, out + j * padded);
}

INLINE vec load_as(const void *p, int64_t dtype, int64_t i) {
    return dtype == FLOAT32 ? load((const float *)p + i) : load_bfloat16((const uint16_t *)p + i);
}

// Stores the scores of the keys of a block [BLOCK, stride] with the query of one head.
INLINE void score_block(const void *keys, int64_t dtype, int64_t stride, const float *query, int64_t padded,
                        float scale, float softcap, float *out) {
    for (int j = 0; j < BLOCK; j += LANES) {
        vec sums[LANES] = {};
        for (int64_t i = 0; i < padded; i += LANES) {
            const vec q = load(query + i);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) sums[lane] += q * load_as(keys, dtype, (j + lane) * stride + i);
        }
        const vec found = sums_of(sums) * scale;
        store(out + j, softcap == 0 ? found : softcap * tanh_of(found / softcap));
    }
}

// Replaces `count` scores, a multiple of BLOCK, by e^(score - maximum). Only those in [begin, end) have weight.
INLINE float exponentiate(float *scores, int64_t count, int64_t begin, int64_t end, const float *sink) {
    float most = sink ? *sink : -INFINITY;
    for (int64_t i = 0; i < begin; i++) scores[i] = -INFINITY;
    for (int64_t i = end; i < count; i++) scores[i] = -INFINITY;
    vec largest = splat(most), sums = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const vec v = load(scores + i);
        largest = select_less(largest, v, v, largest);
    }
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, exp_of(load(scores + i) - most));
    for (int64_t i = 0; i < begin; i++) scores[i] = 0;
    for (int64_t i = end; i < count; i++) scores[i] = 0;
    for (int64_t i = 0; i < count; i += LANES) sums += load(scores + i);
    vec extra = splat(sink ? *sink - most : 0);
    return sum_of(sums) + (sink ? exp_of(extra)[0] : 0.0f);
}

// Adds the weighted values of a block, of the tokens [begin, end), to the output of one head.
INLINE void add_values(const void *values, int64_t dtype, int64_t stride, const float *weights, int64_t begin,
                       int64_t end, int64_t padded, float *out) {
    for (int64_t i = 0; i < padded; i += LANES) {
        vec sum = load(out + i);
        for (int64_t j = begin; j < end; j++) sum += weights[j] * load_as(values, dtype, j * stride + i);
        store(out + i, sum);
    }
}

// Computes the attention of `count` query heads of one row, from `head` on: a part of the heads of one key/value head,
// or all heads of some. The cache is read in the order of its memory.
static void attend(const Model *model, const Layer *layer, const Step *step, int64_t row, int64_t head, int64_t count,
                   const float *q, float *out, float *scratch) {
    const int64_t dim = model->head_dim, padded = (dim + LANES - 1) / LANES * LANES, position = step->positions[row];
    const int64_t first = layer->window && position >= layer->window ? position - layer->window + 1 : 0;
    const int64_t begin = first / BLOCK, end = position / BLOCK + 1, keys = (end - begin) * BLOCK;
    const int64_t share = model->heads / model->kv_heads, many = count < share ? count : share, groups = count / many;
    const Units units = {step->blocks + step->tables[row] + begin, (end - begin) * groups, groups, head / share,
                         BLOCK * model->kv_heads * dim, dim};
    const int64_t stride = model->kv_heads * dim, size = model->cache_dtype == FLOAT32 ? 4 : 2;
    const int copied = padded != dim;
    const float scale = (float)model->score_scale, softcap = (float)model->score_softcap;
    float *block = scratch, *queries = block + BLOCK * padded, *sums = queries + count * padded;
    float *totals = sums + count * padded, *scores = totals + count;
    memset(scratch, 0, (BLOCK + 2 * count) * padded * sizeof(float)); // padding must be 0
    for (int64_t h = 0; h < count; h++) memcpy(queries + h * padded, q + h * dim, dim * sizeof(float));
    for (int64_t unit = 0; unit < units.count; unit++) {
        const int64_t b = unit / groups, from = unit % groups * many;
        const void *at = (const char *)layer->keys + unit_begin(&units, unit) * size;
        prefetch_unit(&units, unit + 3, layer->keys, size);
        if (copied) copy_unit(&units, unit, layer->keys, model->cache_dtype, padded, block);
        for (int64_t h = from; h < from + many; h++) {
            float *to = scores + h * keys + b * BLOCK;
            const float *query = queries + h * padded;
            if (copied) score_block(block, FLOAT32, padded, query, padded, scale, softcap, to);
            else if (size == 4) score_block(at, FLOAT32, stride, query, padded, scale, softcap, to);
            else score_block(at, BFLOAT16, stride, query, padded, scale, softcap, to);
        }
    }
    for (int64_t h = 0; h < count; h++) {
        const float *slopes = model->slopes.data;
        if (slopes)
            for (int64_t i = 0; i < keys; i++)
                scores[h * keys + i] -= slopes[head + h] * (float)(position - begin * BLOCK - i);
        float sink = 0;
        if (layer->sinks.data) sink = element(layer->sinks.data, layer->sinks.dtype, head + h);
        totals[h] = exponentiate(scores + h * keys, keys, first - begin * BLOCK, position + 1 - begin * BLOCK,
                                 layer->sinks.data ? &sink : 0);
    }
    for (int64_t unit = 0; unit < units.count; unit++) {
        const int64_t b = unit / groups, from = unit % groups * many, start = (begin + b) * BLOCK;
        const int64_t skipped = start < first ? first - start : 0;
        const int64_t until = start + BLOCK > position + 1 ? position + 1 - start : BLOCK;
        const void *at = (const char *)layer->values + unit_begin(&units, unit) * size;
        prefetch_unit(&units, unit + 3, layer->values, size);
        if (copied) copy_unit(&units, unit, layer->values, model->cache_dtype, padded, block);
        for (int64_t h = from; h < from + many; h++) {
            const float *weights = scores + h * keys + b * BLOCK;
            float *to = sums + h * padded;
            if (copied) add_values(block, FLOAT32, padded, weights, skipped, until, padded, to);
            else if (size == 4) add_values(at, FLOAT32, stride, weights, skipped, until, padded, to);
            else add_values(at, BFLOAT16, stride, weights, skipped, until, padded, to);
        }
    }
    for (int64_t h = 0; h < count; h++)
        for (int64_t i = 0; i < dim; i++) out[h * dim + i] = sums[h * padded + i] / totals[h];
}
