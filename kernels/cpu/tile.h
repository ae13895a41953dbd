// The inner loop of everything: up to 12 rows of x times two vectors of w, summed over units.
//
//     out[r][0 .. 31] = sum over k < units of x[r][k] * w[k][0 .. 31]
//
// A unit of x is broadcast; its 24 accumulators stay in registers, and two vectors of w are read for every 24 products.
// (The compilers keep an array of accumulators in memory, so each is a variable.)
#pragma once
#include "simd.h"

enum { ROWS = 12 };
enum { FLOAT32 = 0, BF16 = 1, INT8 = 2 };

#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define ZERO(r) a##r = b##r = zero;
#define STEP(r) if (r < rows) { vi u = splat_unit(x + r * x_stride); a##r = DOT(a##r, w0, u); b##r = DOT(b##r, w1, u); }
#define KEEP(r) if (r < rows) { out[r][0] = (vi)a##r; out[r][1] = (vi)b##r; }
#define LOOP(vec) \
    const vec zero = {0}; \
    vec a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11; \
    EACH_ROW(ZERO) \
    for (; units--; x += 4, w += w_stride) { \
        vi w0 = load_units(w), w1 = load_units(w + w_second); \
        EACH_ROW(STEP) \
    } \
    EACH_ROW(KEEP)

// Strides in bytes; `w_second`: how far the second vector lies behind the first.
INLINE void tile_of(const char *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t w_second, int64_t units,
                    vi (*out)[2], const int rows, const int type) {
    if (type == BF16) {
#define DOT dot_bf16
        LOOP(vf)
#undef DOT
    } else if (type == INT8) {
#define DOT dot_int8
        LOOP(vi)
#undef DOT
    } else {
#define DOT dot_float
        LOOP(vf)
#undef DOT
    }
}

#define DEFINE_TILE(name, type) \
    static void name(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t w_second, int64_t units, \
                     vi (*out)[2], int64_t rows) { \
        switch (rows) { \
            TILE_CASE(1, type) TILE_CASE(2, type) TILE_CASE(3, type) TILE_CASE(4, type) TILE_CASE(5, type) \
            TILE_CASE(6, type) TILE_CASE(7, type) TILE_CASE(8, type) TILE_CASE(9, type) TILE_CASE(10, type) \
            TILE_CASE(11, type) TILE_CASE(12, type) \
        } \
    }
#define TILE_CASE(n, type) case n: tile_of(x, x_stride, w, w_stride, w_second, units, out, n, type); break;
