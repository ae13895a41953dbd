// The functions that Python calls, and the structures that they take.
#pragma once
#include <stdint.h>

enum { PLAIN = 0, SILU_MUL = 1, GELU_MUL = 2 };  // gated: a panel holds 16 gates, then the 16 outputs that they scale

// A product with packed weights, see linear.c.
typedef struct {
    const void *x, *w;      // [M, K], rows `x_stride` values apart; panels
    const float *w_scale;   // [N padded] int8 only
    const int32_t *offset;  // [N padded] int8 only: 128 * the sum of an output's weights, which the bias of x adds to it
    const float *bias;      // [N padded] or NULL
    void *y;                // [M, N], rows `y_stride` values apart; half as wide if gated
    char *scratch;          // int8 only: M * (K + 4) bytes for x as bytes and its scales
    int64_t m, n, k, x_stride, y_stride;
    int64_t epilogue, is_int8, is_bf16;  // is_bf16: x and y, else they are float32
} Linear;

// Where the tokens of a step lie, and their rotation; all layers share it.
typedef struct {
    const int64_t *slots;    // [T] block * block_size + offset, -1: not stored
    const int64_t *tables;   // [S, table_stride]
    const int64_t *starts;   // [S + 1] first query token of each sequence
    const int64_t *lengths;  // [S] cached tokens, this step's included
    const int64_t *tasks;    // [num_tasks, 3] sequence, first and last + 1 of its tokens in this step; longest first
    const void *cos, *sin;   // [T, rotary] or NULL
    int64_t num_tokens, num_tasks, table_stride, rotary;
} Step;

// Attention of one layer, see attention.c.
typedef struct {
    const Step *step;
    void *query;                      // [T, H, D], rows of a token q_stride values apart
    const void *key, *value;          // [T, H_kv, D], D of the values; k_stride, v_stride
    void *k_cache, *v_cache, *out;    // out [T, H, D of the values]
    const void *q_weight, *k_weight;  // [D] or NULL: of an RMSNorm before the rotation
    int64_t heads, kv_heads, k_size, v_size, block_size, q_stride, k_stride, v_stride, window;
    int64_t is_bf16, is_int8;  // is_int8: the cache; else it is bf16 or float32, like everything here
    float scale, softcap, eps, weight_offset;
} Attention;

// One token to draw, see sample.c. All fields are double, so that they come from one tensor.
typedef struct {
    double row, temperature, top_k, top_p, min_p;  // row of the logits; temperature 0: the largest; top_k at least 1
    double uniform;                                // below 1: where in the cumulative distribution, in vocabulary order
} Draw;

void linear(const Linear *l);
void store_kv(const Attention *a);
void paged_attention(const Attention *a);
void rms_norm(const char *x, char *residual, const void *weight, char *y, int64_t rows, int64_t n, int64_t x_stride,
              float eps, float offset, int64_t is_bf16);
void quantize_rows(const char *x, uint8_t *q, float *scales, int64_t rows, int64_t n, int64_t x_stride, int64_t is_bf16);
void add_rows(char *x, const char *y, int64_t n, int64_t is_bf16);

// x [rows, n], bf16 or float32, rows x_stride values apart -> a token for each row, or for each draw; -1 if the largest
// value of the row is not finite or any value is NaN.
void argmax(const char *x, int64_t *tokens, int64_t rows, int64_t n, int64_t x_stride, int64_t is_bf16);
void sample(const char *x, const Draw *draws, int64_t *tokens, int64_t num_draws, int64_t n, int64_t x_stride,
            int64_t is_bf16);
