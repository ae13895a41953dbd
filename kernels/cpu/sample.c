// From logits to tokens, a row at a time: the likeliest, or one drawn by a row's own settings.
//
// To draw, a row of logits becomes a row of weights, the largest of them 1; a filter sets to 0 the weights that it drops.
// Top-k and top-p keep the heaviest tokens, and of equal ones the lower ids. Nothing is sorted for that: positive floats are
// ordered as their bits are, and three histograms find the bits of the last weight to keep, ten at a time.
#include <stdlib.h>
#include "kernels.h"
#include "simd.h"

enum { BLOCK = 16 * LANES, BITS = 10 };  // weights summed at a time; bits that a histogram tells apart
#define SLACK 1e-6                       // how far sums of float32 may be from top_p, as in sampler.py

typedef struct { double mass; int64_t count; } Bin;

// The lowest index of the largest of n values, or -1 if that is not finite or one of them is not a number.
INLINE int64_t largest(const void *x, int64_t n, const int is_bf16) {
    vf best = splat(-INFINITY);
    vi at = {0}, index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, invalid = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES, index += LANES) {
        vf v = load(x, i, is_bf16);
        vi more = above(v, best);
        best = choose(more, v, best);
        at = (vi)choose(more, (vf)index, (vf)at);
        invalid |= is_nan(v);
    }
    float most = -INFINITY;
    int64_t where = -1;
    for (int lane = 0; lane < LANES; lane++) {
        if (invalid[lane]) return -1;
        if (best[lane] > most || (best[lane] == most && at[lane] < where)) most = best[lane], where = at[lane];
    }
    for (; i < n; i++) {
        float v = load_scalar(x, i, is_bf16);
        if (v != v) return -1;
        if (v > most) most = v, where = i;
    }
    return isfinite(most) ? where : -1;
}

static double block_sum(const float *w) {
    double sums[LANES] = {0}, sum = 0;
    for (int i = 0; i < BLOCK; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += w[i + lane];
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

// Sets weights below `least` to 0, and those equal to it after the token `last`; returns the sum of the rest. n: whole blocks.
static double drop_below(float *w, int64_t n, float least, int64_t last) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int32_t equals = last < i ? -1 : last - i < BLOCK ? last - i : BLOCK;  // from the block's start
        for (int32_t j = 0; j < BLOCK; j++)
            w[i + j] = (w[i + j] > least) | ((w[i + j] == least) & (j <= equals)) ? w[i + j] : 0;
        sum += block_sum(w + i);
    }
    return sum;
}

// The first 16 weights from the i-th on of which one has bits in [low, low + span); n if there are none.
INLINE int64_t find(const uint32_t *bits, int64_t i, int64_t n, uint32_t low, uint32_t span) {
    for (; i < n; i += LANES) {
        int32_t found = 0;
        for (int lane = 0; lane < LANES; lane++) found |= bits[i + lane] - low < span;
        if (found) break;
    }
    return i;
}

// Keeps the heaviest weights, as few as make k, or sum to `target` > 0; returns their sum.
static double keep_heaviest(float *w, int64_t n, int64_t k, double target) {
    const uint32_t *bits = (const uint32_t *)w;
    uint32_t least = 0;  // the bits of the weight at which the order ends, from the upper ones down
    double mass = 0;     // of the weights above
    int64_t count = 0;
    for (int shift = 2 * BITS; shift >= 0; shift -= BITS) {
        Bin bins[1 << BITS] = {0};
        uint32_t low = least > 0 ? least : 1, span = least + (1u << (shift + BITS)) - low;
        for (int64_t i = 0; (i = find(bits, i, n, low, span)) < n; i += LANES)
            for (int64_t j = i; j < i + LANES; j++) {
                if (bits[j] - low >= span) continue;
                Bin *bin = bins + ((bits[j] - least) >> shift);
                bin->mass += w[j], bin->count++;
            }
        int64_t b = (1 << BITS) - 1;
        for (; b > 0 && count + bins[b].count < k && mass + bins[b].mass < target; b--)
            mass += bins[b].mass, count += bins[b].count;
        least += b << shift;
    }
    int64_t last = -1;
    for (int64_t i = 0; count < k && mass < target && (i = find(bits, i, n, least, 1)) < n; i += LANES)
        for (int64_t j = i; j < i + LANES && count < k && mass < target; j++)
            if (bits[j] == least) last = j, mass += w[j], count++;
    float value;
    memcpy(&value, &least, 4);
    return drop_below(w, n, value, last);
}

// The first token at which the running sum of n weights exceeds `target`, which is below their sum; n: whole blocks.
static int64_t quantile(const float *w, int64_t n, double target) {
    int64_t i = 0, token = -1;
    double before = 0, sum;
    for (; i + BLOCK < n && before + (sum = block_sum(w + i)) <= target; i += BLOCK) before += sum;
    for (int64_t j = i; j < i + BLOCK && before <= target; j++)
        if (w[j] > 0) token = j, before += w[j];
    return token;
}

INLINE void weigh(float *w, vf x, float most, float scale) {
    vf exponent = (x - splat(most)) * splat(scale);
    *(vf *)w = choose(above(exponent, splat(-126.f)), exp2_of(exponent), (vf){0});  // NaN is -inf * 0
}

// w [room] = 2^((x - most) * scale), 0 after n of them; returns the sum. room: whole blocks.
INLINE double weigh_row(const void *x, float *w, int64_t n, int64_t room, float most, float scale, const int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) weigh(w + i, load(x, i, is_bf16), most, scale);
    for (; i < room; i += LANES) {
        float rest[LANES];
        for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < n ? load_scalar(x, i + lane, is_bf16) : -INFINITY;
        weigh(w + i, load(rest, 0, 0), most, scale);
    }
    double sum = 0;
    for (i = 0; i < room; i += BLOCK) sum += block_sum(w + i);
    return sum;
}

INLINE int64_t draw(const void *x, float *w, int64_t n, int64_t room, const Draw *d, const int is_bf16) {
    int64_t token = largest(x, n, is_bf16);
    if (token < 0 || d->temperature == 0) return token;
    double scale = 1.4426950408889634 / fmax(d->temperature, 1e-10);  // of exponents of 2
    double mass = weigh_row(x, w, n, room, load_scalar(x, token, is_bf16), scale, is_bf16);
    if (d->top_k < n) mass = keep_heaviest(w, room, d->top_k, INFINITY);
    if (d->top_p < 1) mass = keep_heaviest(w, room, n, fmax((d->top_p - SLACK) * mass, 1e-30));
    if (d->min_p > 0) mass = drop_below(w, room, d->min_p, room);
    return quantile(w, room, d->uniform * mass);
}

void argmax(const char *x, int64_t *tokens, int64_t rows, int64_t n, int64_t x_stride, int64_t is_bf16) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = is_bf16 ? largest(x + r * x_stride * 2, n, 1) : largest(x + r * x_stride * 4, n, 0);
}

void sample(const char *x, const Draw *draws, int64_t *tokens, int64_t num_draws, int64_t n, int64_t x_stride,
            int64_t is_bf16) {
    const int64_t room = (n + BLOCK - 1) / BLOCK * BLOCK;
#pragma omp parallel
    {
        float *w = aligned_alloc(64, room * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_draws; i++) {
            const char *row = x + (int64_t)draws[i].row * x_stride * (is_bf16 ? 2 : 4);
            tokens[i] = is_bf16 ? draw(row, w, n, room, draws + i, 1) : draw(row, w, n, room, draws + i, 0);
        }
        free(w);
    }
}
