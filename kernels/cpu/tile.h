// The inner loop of all matrix products: up to ROWS rows of x times two vectors of w, summed over units.
//
//     out[r][0 .. 31] = sum over k < units of x[r][k] * w[k][0 .. 31]
//
// A unit of x is broadcast; the sums stay in registers, and two vectors of w are read for every 2 * ROWS products. (Compilers
// would keep an array of sums in memory, so each sum is a variable.)
#pragma once
#include "simd.h"

#ifdef __AVX512F__
enum { ROWS = 12 };  // 24 accumulators in 32 registers
#else
enum { ROWS = 4 };  // where a vector takes several registers, more rows are no faster and compile slowly
#endif
enum { FLOAT32 = 0, BF16 = 1, INT8 = 2, UINT8 = 3 };  // of two bytes one is unsigned: with INT8 that of x, with UINT8 that of w

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define ZERO(r) a##r = b##r = zero;
#define STEP(r) if (r < rows) { vi u = splat_unit(x + r * x_stride); a##r = DOT(a##r, w0, u); b##r = DOT(b##r, w1, u); }
#define KEEP(r) if (r < rows) { out[r][0] = (vi)a##r; out[r][1] = (vi)b##r; }
#define LOOP(vec) \
    const vec zero = {0}; \
    vec a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11; \
    EACH_ROW(ZERO) \
    for (; units--; x += 4, w += w_stride) { \
        if (ahead) __builtin_prefetch(w + ahead), __builtin_prefetch(w + ahead + 64); \
        vi w0 = load_units(w), w1 = load_units(w + w_second); \
        EACH_ROW(STEP) \
    } \
    EACH_ROW(KEEP)

// Strides and distances in bytes. `w_second`: from the first vector to the second. `ahead`: from w to the weights to prefetch
// for the next call, or 0.
INLINE void tile_of(const char *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t w_second, int64_t ahead,
                    int64_t units, vi (*out)[2], const int rows, const int type) {
    if (type == BF16) {
#define DOT dot_bf16
        LOOP(vf)
#undef DOT
    } else if (type == INT8) {
#define DOT dot_int8
        LOOP(vi)
#undef DOT
    } else if (type == UINT8) {
#define DOT dot_uint8
        LOOP(vi)
#undef DOT
    } else {
#define DOT dot_float
        LOOP(vf)
#undef DOT
    }
}

// A tile of up to ROWS / 2 rows times four vectors: two that lie together, and two more `w_pair` bytes behind them.
#define STEP4(r) if (r < rows) { \
        vi u = splat_unit(x + r * x_stride); \
        a##r = DOT(a##r, w0, u); b##r = DOT(b##r, w1, u); c##r = DOT(c##r, w2, u); d##r = DOT(d##r, w3, u); \
    }
#define ZERO4(r) a##r = b##r = c##r = d##r = zero;
#define KEEP4(r) if (r < rows) { \
        out[r][0] = (vi)a##r; out[r][1] = (vi)b##r; \
        out[ROWS / 2 + r][0] = (vi)c##r; out[ROWS / 2 + r][1] = (vi)d##r; \
    }
#define EACH_OF_SIX(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define LOOP4(vec) \
    const vec zero = {0}; \
    vec a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5; \
    EACH_OF_SIX(ZERO4) \
    for (; units--; x += 4, w += w_stride) { \
        vi w0 = load_units(w), w1 = load_units(w + 64), w2 = load_units(w + w_pair), w3 = load_units(w + w_pair + 64); \
        EACH_OF_SIX(STEP4) \
    } \
    EACH_OF_SIX(KEEP4)

// Rows of the second pair follow in `out` from ROWS / 2 on.
INLINE void wide_tile_of(const char *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t w_pair, int64_t units,
                         vi (*out)[2], const int rows, const int type) {
    if (type == BF16) {
#define DOT dot_bf16
        LOOP4(vf)
#undef DOT
    } else if (type == INT8) {
#define DOT dot_int8
        LOOP4(vi)
#undef DOT
    } else if (type == UINT8) {
#define DOT dot_uint8
        LOOP4(vi)
#undef DOT
    } else {
#define DOT dot_float
        LOOP4(vf)
#undef DOT
    }
}

#define TILE_CASE(n, type) \
    case n: if (n <= ROWS) tile_of(x, x_stride, w, w_stride, w_second, ahead, units, out, n, type); break;
#define DEFINE_TILE(name, type) \
    static void name(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t w_second, int64_t ahead, \
                     int64_t units, vi (*out)[2], int64_t rows) { \
        switch (rows) { \
            TILE_CASE(1, type) TILE_CASE(2, type) TILE_CASE(3, type) TILE_CASE(4, type) TILE_CASE(5, type) \
            TILE_CASE(6, type) TILE_CASE(7, type) TILE_CASE(8, type) TILE_CASE(9, type) TILE_CASE(10, type) \
            TILE_CASE(11, type) TILE_CASE(12, type) \
        } \
    }
#define WIDE_CASE(n, type) \
    case n: if (n <= ROWS / 2) wide_tile_of(x, x_stride, w, w_stride, w_pair, units, out, n, type); break;
#define DEFINE_WIDE_TILE(name, type) \
    static void name(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t w_pair, int64_t units, \
                     vi (*out)[2], int64_t rows) { \
        switch (rows) { \
            WIDE_CASE(1, type) WIDE_CASE(2, type) WIDE_CASE(3, type) WIDE_CASE(4, type) WIDE_CASE(5, type) \
            WIDE_CASE(6, type) \
        } \
    }
