// Causal attention of ragged queries over a paged cache, read in place, and the write to that cache.
//
// A block of the cache holds, for each key/value head, keys as panels of 32 tokens [block_size / 32][D / u][32][u] and
// values as [block_size / u][D][u]. The u values of a unit take 4 bytes (2 bf16, 1 float32, 4 int8) and are multiplied in
// one lane of a dot product, so that both products of attention are the tile of tile.h. Up to ROWS rows (tokens times the
// heads that share keys and values) go through the blocks together, with the running maximum and sum of softmax
// (arXiv:1805.02867).
//
// In an int8 cache the keys of a token have a scale, and so have its values: float32 [block_size] behind the block's bytes.
// Keys are biased by 128. Queries are quantised row by row, without a bias; so are a row's weights for a block, after they
// have been multiplied by the scales of the values.
#include "kernels.h"
#include "tile.h"
#include <stdlib.h>

enum { PANEL = 32 };
static const float NOTHING = -INFINITY;  // below any score

DEFINE_TILE(tile_bf16, BF16)
DEFINE_TILE(tile_float, FLOAT32)
DEFINE_TILE(tile_int8, INT8)
DEFINE_TILE(tile_uint8, UINT8)
DEFINE_WIDE_TILE(wide_bf16, BF16)
DEFINE_WIDE_TILE(wide_float, FLOAT32)
DEFINE_WIDE_TILE(wide_int8, INT8)
DEFINE_WIDE_TILE(wide_uint8, UINT8)

#define OF_TYPE(name, type) \
    ((type) == BF16 ? name##_bf16 : (type) == INT8 ? name##_int8 : (type) == UINT8 ? name##_uint8 : name##_float)

INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t bytes_of(const int type) { return type == INT8 ? 1 : type == BF16 ? 2 : 4; }
// A block of a head: block_size times n values, and their scales.
INLINE int64_t block_bytes(const Attention *a, int64_t n, const int type) {
    return a->block_size * (n * bytes_of(type) + (type == INT8 ? sizeof(float) : 0));
}

// The scales of the tokens of an int8 block.
INLINE float *scales_of(const Attention *a, const char *block, int64_t n) { return (float *)(block + a->block_size * n); }

// Normalises and rotates one head of one token, x -> y: pairs (i, i + rotary / 2). k_size is a multiple of 16.
INLINE void rotate_head(const Attention *a, const void *x, const void *weight, int64_t token, float *y, const int is_bf16) {
    const int64_t half = a->step->rotary / 2, angles = token * a->step->rotary;
    vf squares = {0}, scale = splat(1.f);
    for (int64_t i = 0; i < a->k_size; i += LANES) {
        vf v = load(x, i, is_bf16);
        store(y, i, v, 0);
        squares += v * v;
    }
    if (weight) scale = splat(1.f / sqrtf(sum_of(squares) / a->k_size + a->eps));
    for (int64_t i = 0; weight && i < a->k_size; i += LANES) {
        vf normed = load(y, i, 0) * scale * (load(weight, i, is_bf16) + splat(a->weight_offset));
        store(y, i, rounded(normed, is_bf16), 0);
    }
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf c = load(a->step->cos, angles + i, is_bf16), s = load(a->step->sin, angles + i, is_bf16);
        vf first = load(y, i, 0), second = load(y, i + half, 0);
        store(y, i, first * c - second * s, 0);
        store(y, i + half, second * c + first * s, 0);
    }
    for (; i < half; i++) {
        float c = load_scalar(a->step->cos, angles + i, is_bf16), s = load_scalar(a->step->sin, angles + i, is_bf16);
        float first = y[i], second = y[i + half];
        y[i] = first * c - second * s;
        y[i + half] = second * c + first * s;
    }
}

// Rotates the query of a token, and writes its keys and values to its slot. `type`: of the cache.
INLINE void store_token(const Attention *a, int64_t token, const int type, const int is_bf16) {
    const int64_t size = is_bf16 ? 2 : 4, cached = bytes_of(type), unit = 4 / cached;
    float rotated[a->k_size];
    char row[at_least(a->k_size, a->v_size) * size];
    for (int64_t head = 0; a->query && head < a->heads; head++) {
        char *q = (char *)a->query + (token * a->q_stride + head * a->k_size) * size;
        rotate_head(a, q, a->q_weight, token, rotated, is_bf16);
        for (int64_t i = 0; i < a->k_size; i += LANES) store(q, i, load(rotated, i, 0), is_bf16);
    }
    if (a->step->slots[token] < 0) return;
    int64_t block = a->step->slots[token] / a->block_size, offset = a->step->slots[token] % a->block_size;
    for (int64_t head = 0; head < a->kv_heads; head++) {
        int64_t place = block * a->kv_heads + head;
        char *k = (char *)a->k_cache + place * block_bytes(a, a->k_size, type);
        char *v = (char *)a->v_cache + place * block_bytes(a, a->v_size, type);
        const char *value = (const char *)a->value + (token * a->v_stride + head * a->v_size) * size;
        rotate_head(a, (const char *)a->key + (token * a->k_stride + head * a->k_size) * size, a->k_weight, token, rotated, is_bf16);
        if (type == INT8) scales_of(a, k, a->k_size)[offset] = quantize(rotated, row, a->k_size, 127.f, 128, 0);
        else for (int64_t i = 0; i < a->k_size; i += LANES) store(row, i, load(rotated, i, 0), is_bf16);
        k += offset / PANEL * PANEL * a->k_size * cached + offset % PANEL * 4;
        for (int64_t i = 0; i < a->k_size / unit; i++) memcpy(k + i * PANEL * 4, row + i * 4, 4);
        if (type == INT8) {
            scales_of(a, v, a->v_size)[offset] = quantize(value, row, a->v_size, 127.f, 0, is_bf16);
            value = row;
        }
        v += offset / unit * a->v_size * 4 + offset % unit * cached;
        for (int64_t i = 0; i < a->v_size; i++) memcpy(v + i * 4, value + i * cached, cached);
    }
}

// Rotates `query` in place, if there is one, and writes keys and values to their slots.
void store_kv(const Attention *a) {
#pragma omp parallel for if (a->step->num_tokens > 4)
    for (int64_t token = 0; token < a->step->num_tokens; token++) {
        if (a->is_int8 && a->is_bf16) store_token(a, token, INT8, 1);
        else if (a->is_int8) store_token(a, token, INT8, 0);
        else if (a->is_bf16) store_token(a, token, BF16, 1);
        else store_token(a, token, FLOAT32, 0);
    }
}

// Scales the scores [width] of one row against a block, in place, to exponents of 2; outside the columns first:stop they
// become NOTHING. Returns their maximum, still in lanes.
INLINE vf scale_and_mask(const Attention *a, float *scores, int64_t width, int64_t first, int64_t stop) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float log2e = 1.44269504088896341f;
    const vf scale = splat(a->softcap ? a->scale : a->scale * log2e);
    vf most = splat(NOTHING);
    for (int64_t i = 0; i < width; i += LANES) {
        vf s = load(scores, i, 0) * scale;
        if (a->softcap) {  // tanh(z) = 1 - 2 / (1 + exp(2 z))
            vf twice = vmax(splat(-80.f), s * splat(2.f / a->softcap));
            s = splat(a->softcap * log2e) * (splat(1.f) - splat(2.f) / (splat(1.f) + exp_of(-vmax(splat(-80.f), -twice))));
        }
        if (i < first || i + LANES > stop) {
            vi column = lanes + (int32_t)i;
            s = choose((column >= (int32_t)first) & (column < (int32_t)stop), s, splat(NOTHING));
        }
        most = vmax(most, s);
        store(scores, i, s, 0);
    }
    return most;
}

// One step of the running softmax: scores of one row against a block -> weights 2^(score - maximum), 0 outside the columns
// first:stop. Returns the factor by which the sums of the blocks before shrink.
INLINE float softmax_step(const Attention *a, float *scores, void *weights, int64_t width, int64_t first, int64_t stop,
                    float *maximum, float *sum, const int is_bf16) {
    float before = *maximum, most = max_of(scale_and_mask(a, scores, width, first, stop)), now = most > before ? most : before;
    vf total = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vf s = load(scores, i, 0), w = exp2_of(s - splat(now));
        if (i < first || i + LANES > stop) w = (vf)((vi)w & (s != splat(NOTHING)));
        total += w;
        store(weights, i, w, is_bf16);
    }
    float shrink = before == NOTHING ? 0.f : exp2_of(splat(before - now))[0];
    *maximum = now;
    *sum = *sum * shrink + sum_of(total);
    return shrink;
}

// Up to ROWS rows of a query, copied or quantised.
typedef struct {
    char *values;          // [rows, k_size], in the type of the cache
    float scale[ROWS];     // int8 only
    int32_t offset[ROWS];  // int8 only: 128 * the sum of the row, which the bias of the keys adds to a product
} Query;

INLINE void set_row(const Attention *a, Query *query, int64_t r, const char *x, const int type) {
    char *row = query->values + r * a->k_size * bytes_of(type);
    if (type != INT8) {
        memcpy(row, x, a->k_size * bytes_of(type));
        return;
    }
    query->scale[r] = quantize(x, row, a->k_size, 127.f, 0, a->is_bf16);
    query->offset[r] = 0;
    for (int64_t i = 0; i < a->k_size; i++) query->offset[r] += 128 * ((signed char *)row)[i];
}

// scores [rows, block_size] = query [rows, k_size] * keys of a block, for its first `width` tokens.
INLINE void score(const Attention *a, const Query *query, const char *k, int64_t width, float *scores, int64_t rows,
                  const int type) {
    const int64_t row_bytes = a->k_size * bytes_of(type), panel_bytes = PANEL * row_bytes, units = row_bytes / 4;
    const int product = type == INT8 ? UINT8 : type;
    const float *k_scale = scales_of(a, k, a->k_size);
    vi tile[ROWS][2];
    for (int64_t p = 0; p < width; p += PANEL, k += panel_bytes) {
        int pair = rows <= ROWS / 2 && width - p > PANEL;
        if (pair) OF_TYPE(wide, product)(query->values, row_bytes, k, PANEL * 4, panel_bytes, units, tile, rows);
        else OF_TYPE(tile, product)(query->values, row_bytes, k, PANEL * 4, 64, 0, units, tile, rows);
        for (int64_t r = 0; r < rows; r++) {
            memcpy(scores + r * a->block_size + p, tile[r], sizeof tile[r]);
            if (pair) memcpy(scores + r * a->block_size + p + PANEL, tile[ROWS / 2 + r], sizeof tile[r]);
        }
        if (pair) p += PANEL, k += panel_bytes;
    }
    for (int64_t r = 0; type == INT8 && r < rows; r++)
        for (int64_t i = 0; i < width; i += LANES) {
            float *at = scores + r * a->block_size + i;
            vf exact = __builtin_convertvector(load_units(at) - query->offset[r], vf);
            store(at, 0, exact * splat(query->scale[r]) * load(k_scale, i, 0), 0);
        }
}

// Multiplies the weights [width] of one row by the scales of the values, and quantises them; returns their scale.
INLINE float quantize_weights(float *weights, const float *v_scale, char *bytes, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {  // a token without a weight may have no scale yet, and 0 * NaN is NaN
        vf w = load(weights, i, 0), scaled = w * load(v_scale, i, 0);
        store(weights, i, (vf)((vi)scaled & (w != splat(0.f))), 0);
    }
    return quantize(weights, bytes, width, 255.f, 0, 0);
}

// sums [rows, v_size] = sums * shrink + weights [rows, block_size] * values of a block, for its first `seen` tokens.
// int8: `steps` are the scales of the weights.
INLINE void accumulate(const Attention *a, const char *weights, const char *v, int64_t seen, float *sums, const float *shrink,
                   const float *steps, int64_t rows, const int type) {
    const int64_t unit = 4 / bytes_of(type), weights_bytes = a->block_size * bytes_of(type);
    const int odd = type == BF16 && seen % 2;  // the second value of that unit was never written and may be NaN
    const int64_t units = type == INT8 ? (seen + 3) / 4 : seen / unit;
    vi tile[ROWS][2];
    for (int64_t d = 0, wide; d < a->v_size; d += wide) {
        const char *w = v + d * 4;
        wide = rows <= ROWS / 2 && a->v_size - d >= 2 * PANEL ? 2 * PANEL : at_most(PANEL, a->v_size - d);
        if (wide > PANEL) OF_TYPE(wide, type)(weights, weights_bytes, w, a->v_size * 4, 128, units, tile, rows);
        else OF_TYPE(tile, type)(weights, weights_bytes, w, a->v_size * 4, wide > LANES ? 64 : 0, 0, units, tile, rows);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < wide; i += LANES) {
                vi sum_of_tile = tile[i < PANEL ? r : ROWS / 2 + r][i / LANES % 2];
                vf x = type == INT8 ? __builtin_convertvector(sum_of_tile, vf) * splat(steps[r]) : (vf)sum_of_tile;
                if (odd)
                    x = dot_bf16(x, load_units(w + units * a->v_size * 4 + i * 4) & 0xffff,
                                 splat_unit(weights + r * weights_bytes + units * 4));
                float *sum = sums + r * a->v_size + d + i;
                store(sum, 0, load(sum, 0, 0) * splat(shrink[r]) + x, 0);
            }
    }
}

// Attends with rows first:first + rows (tokens times the heads that share key/value head `head`) of sequence s. `type`: of
// the cache.
INLINE void attend_rows(const Attention *a, int64_t s, int64_t head, int64_t first, int64_t rows, char *scratch,
                        const int type) {
    const int is_bf16 = type == INT8 ? a->is_bf16 : type == BF16;  // the queries
    const int64_t size = is_bf16 ? 2 : 4, cached = bytes_of(type), block_size = a->block_size;
    const int64_t group = a->heads / a->kv_heads, start = a->step->starts[s], num_tokens = a->step->starts[s + 1] - start;
    const int64_t before = a->step->lengths[s] - num_tokens;  // cached tokens ahead of this step's
    float *scores = (float *)scratch, *sums = scores + ROWS * block_size;  // [rows, block_size], [rows, v_size]
    char *weights = (char *)(sums + ROWS * a->v_size);
    Query query = {weights + ROWS * block_size * cached};
    float maximum[ROWS], sum[ROWS] = {0}, shrink[ROWS], steps[ROWS];
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = start + (first + r) / group, h = head * group + (first + r) % group;
        set_row(a, &query, r, (char *)a->query + (token * a->q_stride + h * a->k_size) * size, type);
        maximum[r] = NOTHING;
    }
    memset(sums, 0, rows * a->v_size * sizeof(float));
    int64_t stop = before + (first + rows - 1) / group + 1;  // tokens that the last row sees
    int64_t oldest = a->window ? at_least(0, before + first / group + 1 - a->window) : 0;
    for (int64_t block = oldest / block_size; block * block_size < stop; block++) {
        int64_t place = a->step->tables[s * a->step->table_stride + block] * a->kv_heads + head, base = block * block_size;
        const char *k = (char *)a->k_cache + place * block_bytes(a, a->k_size, type);
        const char *v = (char *)a->v_cache + place * block_bytes(a, a->v_size, type);
        int64_t seen = at_most(block_size, stop - base), width = (seen + PANEL - 1) / PANEL * PANEL;
        for (int64_t i = 0; rows <= ROWS / 2 && i < seen * a->v_size * cached; i += 64) __builtin_prefetch(v + i, 0, 0);
        score(a, &query, k, width, scores, rows, type);
        for (int64_t r = 0; r < rows; r++) {
            int64_t last = before + (first + r) / group - base;  // the row's own token, as a column of this block
            int64_t from = a->window ? at_least(0, last + 1 - a->window) : 0;
            float *row = scores + r * block_size;
            char *to = weights + r * block_size * cached;
            shrink[r] = softmax_step(a, row, type == INT8 ? (char *)row : to, width, from, at_least(0, last + 1), &maximum[r],
                               &sum[r], type == BF16);
            if (type == INT8) steps[r] = quantize_weights(row, scales_of(a, v, a->v_size), to, width);
        }
        accumulate(a, weights, v, seen, sums, shrink, steps, rows, type);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = start + (first + r) / group, h = head * group + (first + r) % group;
        vf scale = splat(1.f / sum[r]);
        for (int64_t i = 0; i < a->v_size; i += LANES)
            store(a->out, (token * a->heads + h) * a->v_size + i, load(sums, r * a->v_size + i, 0) * scale, is_bf16);
    }
}

static void attend_bf16(const Attention *a, int64_t s, int64_t head, int64_t first, int64_t rows, char *scratch) {
    attend_rows(a, s, head, first, rows, scratch, BF16);
}
static void attend_float(const Attention *a, int64_t s, int64_t head, int64_t first, int64_t rows, char *scratch) {
    attend_rows(a, s, head, first, rows, scratch, FLOAT32);
}
static void attend_int8(const Attention *a, int64_t s, int64_t head, int64_t first, int64_t rows, char *scratch) {
    attend_rows(a, s, head, first, rows, scratch, INT8);
}

// Tasks come longest first, so that no thread is left with a long one at the end.
void paged_attention(const Attention *a) {
    int64_t group = a->heads / a->kv_heads;
    size_t room = ROWS * 4 * (2 * a->block_size + a->v_size + a->k_size);
#pragma omp parallel
    {
        char *scratch = aligned_alloc(64, (room + 63) / 64 * 64);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a->step->num_tasks * a->kv_heads; i++) {
            const int64_t *task = a->step->tasks + i / a->kv_heads * 3;
            for (int64_t row = task[1] * group; row < task[2] * group; row += ROWS)
                (a->is_int8 ? attend_int8 : a->is_bf16 ? attend_bf16 : attend_float)(
                    a, task[0], i % a->kv_heads, row, at_most(ROWS, task[2] * group - row), scratch);
        }
        free(scratch);
    }
}
