// Random numbers that are computed from an index (see weft/models/counter_random.py, whose values these are, bit by bit:
// the same operations in the same order, so compile it with -ffp-contract=off).
#include <math.h>
#include <stdint.h>
#include <string.h>

#define GROUPS 128 // groups of four columns that are computed at once; the compiler vectorizes the loops over them
#define ROUNDS 7

typedef struct {
    uint32_t word[4][GROUPS];
    float value[4][GROUPS];
    float row[4 * GROUPS];
} Work;

// Philox4x32 of the counters (first + i, row, row >> 32, 0).
static void draw_words(Work *w, int n, int64_t first, int64_t row, uint64_t key) {
    for (int i = 0; i < n; i++) {
        w->word[0][i] = (uint32_t)(first + i);
        w->word[1][i] = (uint32_t)row;
        w->word[2][i] = (uint32_t)(row >> 32);
        w->word[3][i] = 0;
    }
    uint32_t low_key = (uint32_t)key, high_key = (uint32_t)(key >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < n; i++) {
            const uint64_t low = (uint64_t)w->word[0][i] * 0xD2511F53u, high = (uint64_t)w->word[2][i] * 0xCD9E8D57u;
            w->word[0][i] = (uint32_t)(high >> 32) ^ w->word[1][i] ^ low_key;
            w->word[2][i] = (uint32_t)(low >> 32) ^ w->word[3][i] ^ high_key;
            w->word[1][i] = (uint32_t)high;
            w->word[3][i] = (uint32_t)low;
        }
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
}

static inline float fraction(uint32_t bits) { return ((float)(int32_t)(bits >> 8) + 0.5f) * 0x1p-24f; }

static inline float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits -= 0x3f3504f3;
    const float exponent = (float)(bits >> 23);
    bits = (bits & 0x7fffff) + 0x3f3504f3;
    memcpy(&x, &bits, 4);
    const float f = x - 1.0f, z = f * f;
    float y = 7.0376836292e-2f;
    y = y * f + -1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f + -1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f + -1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f + -2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * z;
    y = y + exponent * -2.12194440e-4f;
    y = y - z * 0.5f;
    return f + y + exponent * 0.693359375f;
}

static void normal_values(Work *w, int n, float std) {
    for (int pair = 0; pair < 4; pair += 2)
        for (int i = 0; i < n; i++) {
            const float radius = sqrtf(logarithm(fraction(w->word[pair][i])) * -2.0f) * std;
            const float turn = fraction(w->word[pair + 1][i]) * 4.0f, quarter = floorf(turn + 0.5f);
            const float x = (turn - quarter) * 1.57079637f, z = x * x;
            const float sine = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z + -1.6666654611e-1f) * z * x + x;
            const float cosine =
                ((z * 2.443315711809948e-5f + -1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
                z * 0.5f + 1.0f;
            const int32_t q = (int32_t)quarter;
            const float along = q & 1 ? sine : cosine, across = q & 1 ? cosine : sine;
            w->value[pair][i] = radius * (along * (float)(1 - ((q + 1) & 2)));
            w->value[pair + 1][i] = radius * (across * (float)(1 - (q & 2)));
        }
}

static void uniform_values(Work *w, int n, float width, float bound) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < n; i++) w->value[j][i] = fraction(w->word[j][i]) * width - bound;
}

// Fills `count` rows of `columns` floats.
//   rows: number of each row in the full tensor.
//   first: number of the first column in the full tensor.
//   scale: standard deviation, or the bound of a uniform distribution.
void fill_rows(float *out, const int64_t *rows, int64_t count, int64_t columns, int64_t first, uint64_t key,
               int64_t normal, double scale, int64_t threads) {
    const int64_t group = first / 4, groups = (first + columns + 3) / 4 - group, skipped = first % 4;
    const int64_t blocks = (groups + GROUPS - 1) / GROUPS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t item = 0; item < count * blocks; item++) {
        const int64_t row = item / blocks, block = item % blocks, rest = groups - block * GROUPS;
        const int n = rest < GROUPS ? ((int)rest + 15) & ~15 : GROUPS; // whole vectors
        Work w;
        draw_words(&w, n, group + block * GROUPS, rows[row], key);
        if (normal) normal_values(&w, n, (float)scale);
        else uniform_values(&w, n, (float)(2.0 * scale), (float)scale);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < 4; j++) w.row[4 * i + j] = w.value[j][i];
        const int64_t begin = 4 * block * GROUPS - skipped; // column of `out` of the first value
        const int64_t from = begin < 0 ? 0 : begin, left = columns - from, end = begin + 4 * GROUPS - from;
        memcpy(out + row * columns + from, w.row + (from - begin), (left < end ? left : end) * sizeof(float));
    }
}
