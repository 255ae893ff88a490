// One forward pass of a decoder-only transformer for a few tokens (see weft/kernels/decode_step.py).
//
// All threads run `run_layers`, with a barrier after each phase. Each thread keeps a copy of the residual stream, so
// that the norms need no barriers.
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attention.h"
#include "linear.h"

#define STRIPE_ROWS 32 // outputs of a linear layer that a thread computes at once

typedef struct {
    atomic_int arrived, passed;
} Barrier;

typedef struct {
    float *queries, *keys, *values, *attended, *branch, *inner; // shared by all threads
    float *x, *normed, *attention_branch, *scratch;             // of one thread
    Packed packed;
    Barrier *barrier;
    int thread, threads;
    int exact; // whether activations are float32
} Work;

// Threads spin, because the phases take microseconds; they give way if there are more threads than processors.
static void wait_for_all(Work *w) {
    Barrier *b = w->barrier;
    const int passed = atomic_load(&b->passed);
    if (atomic_fetch_add(&b->arrived, 1) == w->threads - 1) {
        atomic_store(&b->arrived, 0);
        atomic_store(&b->passed, passed + 1);
        return;
    }
    for (int spins = 0; atomic_load(&b->passed) == passed; spins++) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
        if (spins > 20000) sched_yield();
    }
}

INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t aligned(int64_t floats) { return (floats + 15) / 16 * 16 + 16; }

// Places the arrays of a thread in the workspace. Returns the number of floats of the workspace.
static int64_t place(const Model *m, int64_t rows, int64_t longest, int threads, int thread, float *base, Work *w) {
    const int64_t heads = m->heads * m->head_dim, groups = m->kv_heads * m->head_dim;
    const int64_t widest = most_of(most_of(m->hidden, m->inner), heads);
    int64_t at = aligned(16);
    float **shared[] = {&w->queries, &w->keys, &w->values, &w->attended, &w->branch, &w->inner};
    const int64_t widths[] = {heads, groups, groups, heads, m->hidden, m->inner};
    for (int i = 0; i < 6; i++) *shared[i] = base + at, at += aligned(rows * widths[i]);
    const int64_t scratch = most_of(most_of(attend_scratch(m->heads, longest, m->head_dim), widest),
                                    2 * rows * STRIPE_ROWS);
    float **own[] = {&w->x, &w->normed, &w->attention_branch, &w->scratch, (float **)&w->packed.data};
    const int64_t sizes[] = {rows * m->hidden, rows * m->hidden, rows * m->hidden, scratch, (rows + 16) * (widest + 64)};
    int64_t size = 0;
    for (int i = 0; i < 5; i++) size += aligned(sizes[i]);
    int64_t mine = at + thread * size;
    for (int i = 0; i < 5; i++) *own[i] = base + mine, mine += aligned(sizes[i]);
    return at + threads * size;
}

// Bytes of the workspace of steps with at most `rows` rows and `longest` keys.
int64_t workspace_bytes(const Model *m, int64_t rows, int64_t longest, int64_t threads) {
    Work w;
    return 4 * place(m, rows, longest, (int)threads, 0, NULL, &w) + 64;
}

// Normalizes `rows` rows of `width` elements.
static void normalize(const Model *m, const Norm *norm, int kind, const float *x, int64_t rows, int64_t width,
                      float *out, float *weight) {
    expand(norm->weight.data, norm->weight.dtype, 0, width, weight);
    if (kind == RMSNORM1P)
        for (int64_t i = 0; i < width; i++) weight[i] += 1.0f;
    const int64_t even = width / LANES * LANES;
    for (int64_t t = 0; t < rows; t++, x += width, out += width) {
        float mean = 0, squares = 0;
        vec sums = {};
        if (kind == LAYERNORM) {
            for (int64_t i = 0; i < even; i += LANES) sums += load(x + i);
            for (int64_t i = even; i < width; i++) mean += x[i];
            mean = (mean + sum_of(sums)) / (float)width, sums = (vec){};
        }
        for (int64_t i = 0; i < even; i += LANES) {
            const vec v = load(x + i) - mean;
            sums += v * v;
        }
        for (int64_t i = even; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
        const float factor = 1.0f / sqrtf((squares + sum_of(sums)) / (float)width + (float)m->eps);
        for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * factor * weight[i];
        if (norm->bias.data)
            for (int64_t i = 0; i < width; i++) out[i] += element(norm->bias.data, norm->bias.dtype, i);
    }
}

// Computes linear layers of equal input. The threads share the outputs in stripes.
static void linear(Work *w, const Matrix *const *matrices, float *const *outs, int count, const float *x,
                   int64_t rows) {
    pack(x, rows, matrices[0]->columns, matrices[0]->dtype, uses_tiles(matrices, count, w->exact), &w->packed);
    int64_t stripes = 0, before = 0;
    for (int i = 0; i < count; i++) stripes += (matrices[i]->rows + STRIPE_ROWS - 1) / STRIPE_ROWS;
    const int64_t first = stripes * w->thread / w->threads, last = stripes * (w->thread + 1) / w->threads;
    for (int i = 0; i < count; i++) {
        const int64_t n = matrices[i]->rows, many = (n + STRIPE_ROWS - 1) / STRIPE_ROWS;
        const int64_t begin = most_of(first - before, 0) * STRIPE_ROWS;
        const int64_t end = last - before < many ? (last - before) * STRIPE_ROWS : n;
        if (begin < end) project(matrices[i], &w->packed, begin, end, outs[i] + begin, n);
        before += many;
    }
}

// Computes the inner activations of a gated MLP, in stripes.
static void gated(const Model *m, const Layer *layer, Work *w, int64_t rows) {
    const Matrix *matrices[] = {&layer->gate, &layer->up};
    pack(w->normed, rows, m->hidden, layer->gate.dtype, uses_tiles(matrices, 2, w->exact), &w->packed);
    const int64_t stripes = (m->inner + STRIPE_ROWS - 1) / STRIPE_ROWS;
    float *gates = w->scratch, *ups = w->scratch + rows * STRIPE_ROWS;
    for (int64_t s = stripes * w->thread / w->threads; s < stripes * (w->thread + 1) / w->threads; s++) {
        const int64_t begin = s * STRIPE_ROWS, end = begin + STRIPE_ROWS < m->inner ? begin + STRIPE_ROWS : m->inner;
        project(&layer->gate, &w->packed, begin, end, gates, STRIPE_ROWS);
        project(&layer->up, &w->packed, begin, end, ups, STRIPE_ROWS);
        for (int64_t t = 0; t < rows; t++) {
            float found[STRIPE_ROWS];
            for (int i = 0; i < STRIPE_ROWS; i += LANES)
                store(found + i, activate(load(gates + t * STRIPE_ROWS + i), m->activation) *
                                     load(ups + t * STRIPE_ROWS + i));
            memcpy(w->inner + t * m->inner + begin, found, (end - begin) * sizeof(float));
        }
    }
}

// Computes the inner activations of a plain MLP. Each thread activates the stripes that it computed.
static void plain(const Model *m, const Layer *layer, Work *w, int64_t rows) {
    const Matrix *matrices[] = {&layer->up};
    float *outs[] = {w->inner};
    linear(w, matrices, outs, 1, w->normed, rows);
    const int64_t stripes = (m->inner + STRIPE_ROWS - 1) / STRIPE_ROWS;
    const int64_t begin = stripes * w->thread / w->threads * STRIPE_ROWS;
    const int64_t last = stripes * (w->thread + 1) / w->threads * STRIPE_ROWS, end = last < m->inner ? last : m->inner;
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = begin; i < end; i += LANES) {
            float *at = w->inner + t * m->inner + i, part[LANES] = {0};
            const int64_t many = end - i < LANES ? end - i : LANES;
            memcpy(part, at, many * sizeof(float));
            store(part, activate(load(part), m->activation));
            memcpy(at, part, many * sizeof(float));
        }
}

// Normalizes and rotates the queries and keys, and writes keys and values to the cache: a head of a row at a time.
static void place_heads(const Model *m, const Layer *layer, const Step *s, Work *w) {
    const int64_t dim = m->head_dim, heads = m->heads, groups = m->kv_heads, units = heads + 2 * groups;
    const int kind = m->norm_kind == RMSNORM1P ? RMSNORM1P : RMSNORM;
    for (int64_t task = w->thread; task < s->rows * units; task += w->threads) {
        const int64_t t = task / units, unit = task % units, query = unit < heads, key = !query && unit < heads + groups;
        const int64_t head = query ? unit : key ? unit - heads : unit - heads - groups, many = query ? heads : groups;
        float *x = (query ? w->queries : key ? w->keys : w->values) + (t * many + head) * dim;
        const Norm norm = {.weight = query ? layer->q_norm : layer->k_norm};
        if (m->clip != 0)
            for (int64_t i = 0; i < dim; i++) x[i] = fminf(fmaxf(x[i], (float)-m->clip), (float)m->clip);
        if ((query || key) && norm.weight.data && !m->norm_all_heads) normalize(m, &norm, kind, x, 1, dim, x, w->scratch);
        if ((query || key) && layer->rotary >= 0) {
            const int64_t half = m->rotary_dim / 2, at = s->angles[t] * half;
            rotate(x, s->cos[layer->rotary] + at, s->sin[layer->rotary] + at, m->rotary_dim);
        }
        if (!query) {
            const int64_t position = s->positions[t], block = s->blocks[s->tables[t] + position / BLOCK];
            const int64_t slot = block * BLOCK + position % BLOCK;
            write_cache(x, dim, key ? layer->keys : layer->values, m->cache_dtype, (slot * groups + head) * dim);
        }
    }
}

static void attention(const Model *m, const Layer *layer, const Step *s, Work *w) {
    const int64_t dim = m->head_dim, group = m->heads / m->kv_heads;
    const Matrix *matrices[] = {&layer->q, &layer->k, &layer->v};
    float *outs[] = {w->queries, w->keys, w->values};
    linear(w, matrices, outs, 3, w->normed, s->rows);
    wait_for_all(w);
    if (m->norm_all_heads && layer->q_norm.data) {
        const int kind = m->norm_kind == RMSNORM1P ? RMSNORM1P : RMSNORM;
        const Norm norms[] = {{.weight = layer->q_norm}, {.weight = layer->k_norm}};
        for (int64_t task = w->thread; task < 2 * s->rows; task += w->threads) {
            const int64_t width = (task % 2 ? m->kv_heads : m->heads) * dim;
            float *x = outs[task % 2] + task / 2 * width;
            normalize(m, &norms[task % 2], kind, x, 1, width, x, w->scratch);
        }
        wait_for_all(w);
    }
    place_heads(m, layer, s, w);
    wait_for_all(w);
    // The heads of a row are computed together, as far as there is enough work for all threads.
    int64_t parts = (2 * w->threads + s->rows - 1) / s->rows;
    if (parts > m->kv_heads) parts = m->heads;
    const int64_t kind = parts > m->kv_heads ? 1 : group;
    for (int64_t task = w->thread; task < s->rows * parts; task += w->threads) {
        const int64_t t = task / parts, part = task % parts;
        const int64_t head = m->heads / kind * part / parts * kind;
        const int64_t end = m->heads / kind * (part + 1) / parts * kind, at = (t * m->heads + head) * dim;
        attend(m, layer, s, t, head, end - head, w->queries + at, w->attended + at, w->scratch);
    }
    wait_for_all(w);
    const Matrix *output[] = {&layer->o};
    linear(w, output, &w->branch, 1, w->attended, s->rows);
    wait_for_all(w);
}

static void mlp(const Model *m, const Layer *layer, const Step *s, Work *w) {
    if (layer->gate.data) gated(m, layer, w, s->rows);
    else plain(m, layer, w, s->rows);
    wait_for_all(w);
    const Matrix *down[] = {&layer->down};
    linear(w, down, &w->branch, 1, w->inner, s->rows);
    wait_for_all(w);
}

// Adds a normalized and scaled branch to `x`.
static void add_branch(const Model *m, const Norm *norm, Work *w, int64_t rows, const float *branch, float *x) {
    if (norm->weight.data) normalize(m, norm, (int)m->norm_kind, branch, rows, m->hidden, w->normed, w->scratch);
    const float *from = norm->weight.data ? w->normed : branch, factor = (float)m->residual_multiplier;
    for (int64_t i = 0; i < rows * m->hidden; i++) x[i] += from[i] * factor;
}

static void prepare(const Model *m, const Norm *norm, Work *w, int64_t rows) {
    if (norm->weight.data) normalize(m, norm, (int)m->norm_kind, w->x, rows, m->hidden, w->normed, w->scratch);
    else memcpy(w->normed, w->x, rows * m->hidden * sizeof(float));
}

static void embed(const Model *m, const Step *s, float *x) {
    for (int64_t t = 0; t < s->rows; t++, x += m->hidden) {
        expand(m->embedding.data, m->embedding.dtype, s->tokens[t] * m->hidden, m->hidden, x);
        if (m->embedding_multiplier != 1) {
            const int half = m->embedding.dtype == BFLOAT16; // PyTorch rounds the product
            const float by = (float)m->embedding_multiplier, factor = half ? from_bfloat16(to_bfloat16(by)) : by;
            for (int64_t i = 0; i < m->hidden; i++)
                x[i] = half ? from_bfloat16(to_bfloat16(x[i] * factor)) : x[i] * factor;
        }
        if (m->positions.data)
            for (int64_t i = 0; i < m->hidden; i++)
                x[i] += element(m->positions.data, m->positions.dtype, s->positions[t] * m->hidden + i);
    }
}

static void output(const Model *m, const Step *s, Work *w) {
    for (int64_t i = 0; i < s->kept; i++) // rows are kept in order
        memmove(w->x + i * m->hidden, w->x + s->kept_rows[i] * m->hidden, m->hidden * sizeof(float));
    prepare(m, &m->norm, w, s->kept);
    if (m->logits_scaling != 1)
        for (int64_t i = 0; i < s->kept * m->hidden; i++) w->normed[i] /= (float)m->logits_scaling;
    const Matrix *head[] = {&m->head};
    float *outs[] = {s->logits};
    linear(w, head, outs, 1, w->normed, s->kept);
    if (m->logit_softcap == 0) return;
    const int64_t vocab = m->head.rows, stripes = (vocab + STRIPE_ROWS - 1) / STRIPE_ROWS;
    const int64_t last = stripes * (w->thread + 1) / w->threads * STRIPE_ROWS;
    for (int64_t t = 0; t < s->kept; t++)
        for (int64_t n = stripes * w->thread / w->threads * STRIPE_ROWS; n < last && n < vocab; n++) {
            float *at = s->logits + t * vocab + n;
            *at = (float)m->logit_softcap * tanhf(*at / (float)m->logit_softcap);
        }
}

static void run_layers(const Model *m, const Step *s, Work *w) {
    const int64_t rows = s->rows, size = rows * m->hidden;
    embed(m, s, w->x);
    for (int64_t i = 0; i < m->layers; i++) {
        const Layer *layer = m->layer + i;
        prepare(m, &layer->attention_norm, w, rows);
        attention(m, layer, s, w);
        if (m->parallel) memcpy(w->attention_branch, w->branch, size * sizeof(float));
        else add_branch(m, &layer->attention_post_norm, w, rows, w->branch, w->x);
        prepare(m, &layer->mlp_norm, w, rows);
        mlp(m, layer, s, w);
        add_branch(m, &layer->mlp_post_norm, w, rows, w->branch, w->x);
        if (m->parallel) add_branch(m, &layer->attention_post_norm, w, rows, w->attention_branch, w->x);
    }
    if (s->kept) output(m, s, w);
}

// Runs a step. `workspace` has `workspace_bytes` bytes.
void decode_step(const Model *m, const Step *s) {
    float *base = (float *)(((uintptr_t)s->workspace + 63) / 64 * 64);
    Barrier *barrier = (Barrier *)base;
    *barrier = (Barrier){0};
#ifdef __AMX_TILE__
    amx_available();
#endif
#pragma omp parallel num_threads((int)s->threads)
    {
        Work w = {.barrier = barrier, .thread = omp_get_thread_num(), .threads = omp_get_num_threads()};
        w.exact = m->cache_dtype == FLOAT32;
        place(m, s->rows, s->longest, w.threads, w.thread, base, &w);
        run_layers(m, s, &w);
#ifdef __AMX_TILE__
        if (amx_available()) _tile_release();
#endif
    }
}
