// The structures that weft/kernels/decode_step.py passes. All integers are int64_t and all numbers double, so that the
// layout has no padding. Pointers to absent tensors are NULL.
#pragma once
#include <stdint.h>

#define MAX_ROWS 32 // tokens per step
#define BLOCK 16    // tokens per block of the cache

enum { FLOAT32, BFLOAT16, INT8, INT4 };
enum { RMSNORM, RMSNORM1P, LAYERNORM };
enum { SILU, GELU, GELU_TANH, RELU, RELU2 };

typedef struct {
    const void *data;
    int64_t dtype; // FLOAT32 or BFLOAT16
} Vector;

typedef struct {
    Vector weight, bias;
} Norm;

typedef struct {
    const void *data;  // [rows, columns]; INT4: groups of 32 columns in 16 bytes, byte j has columns j and j + 16
    const void *scale; // bfloat16, INT8: [rows]; INT4: [rows, groups]
    int64_t rows, columns, dtype;
    Vector bias;
} Matrix;

typedef struct {
    Matrix q, k, v, o, gate, up, down;
    Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
    Vector q_norm, k_norm, sinks;
    void *keys, *values; // [blocks, BLOCK, kv_heads, head_dim]
    int64_t window;      // 0: full attention
    int64_t rotary;      // index of the table of cosines and sines; -1: no rotary embedding
} Layer;

typedef struct {
    int64_t layers, hidden, inner, heads, kv_heads, head_dim, rotary_dim;
    int64_t cache_dtype, norm_kind, activation, parallel, norm_all_heads;
    double eps, embedding_multiplier, residual_multiplier, logits_scaling, score_scale, score_softcap, logit_softcap;
    double clip; // soft-caps and clip: 0: none
    Vector embedding, positions, slopes;
    Norm norm;
    Matrix head;
    const Layer *layer;
} Model;

typedef struct {
    int64_t rows, kept, threads, longest; // longest: number of keys of the longest sequence
    const int64_t *tokens, *positions;    // [rows]
    const int64_t *angles;                // [rows], row of the tables of cosines and sines
    const int64_t *tables;                // [rows], index of the first block of the row's sequence in `blocks`
    const int64_t *kept_rows;             // [kept]
    const int64_t *blocks;
    const float *cos[2], *sin[2]; // [rows, rotary_dim / 2]
    float *logits;                // [kept, vocab]
    char *workspace;
} Step;
