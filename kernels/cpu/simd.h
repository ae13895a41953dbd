// Vectors of 16 floats in the compiler's own vector types, so that one source serves every instruction set: with -march
// of this machine they become one AVX-512 register, two AVX2 ones, or four of NEON.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half16 __attribute__((vector_size(32), aligned(2)));
typedef uint16_t bf16;

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_unit(const void *p) { int32_t x; memcpy(&x, p, 4); return x - (vi){0}; }
INLINE vi load_units(const void *p) { return *(const vi *)p; }

// Masks: all bits of a lane are set, or none. Without AVX-512 gcc compares vectors of this size lane by lane, but turns a
// loop into vectors that fit.
INLINE vi is_nan(vf x) { return (0x7f800000 - ((vi)x & 0x7fffffff)) >> 31; }
#ifdef __AVX512F__
INLINE vi above(vf a, vf b) { return a > b; }
#else
INLINE vi above(vf a, vf b) { vi m; for (int i = 0; i < LANES; i++) m[i] = -(a[i] > b[i]); return m; }
#endif

INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf from_bf16(half16 x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

// Rounds to the nearest, ties to even; NaN stays NaN.
INLINE half16 to_bf16(vf x) {
#ifdef __AVX512BF16__
    return (half16)_mm512_cvtneps_pbh((__m512)x);
#else
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return __builtin_convertvector((vu)choose(is_nan(x), (vf)((u >> 16) | 0x40), (vf)rounded), half16);
#endif
}

INLINE float scalar_from_bf16(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }

INLINE bf16 scalar_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return f != f ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// Tensors are bf16 or float32; `is_bf16` is a constant wherever these are inlined.
INLINE vf load(const void *p, int64_t i, int is_bf16) {
    return is_bf16 ? from_bf16(*(const half16 *)((const bf16 *)p + i)) : *(const vf *)((const float *)p + i);
}
INLINE void store(void *p, int64_t i, vf x, int is_bf16) {
    if (is_bf16) *(half16 *)((bf16 *)p + i) = to_bf16(x);
    else *(vf *)((float *)p + i) = x;
}
INLINE vf rounded(vf x, int is_bf16) { return is_bf16 ? from_bf16(to_bf16(x)) : x; }
INLINE float load_scalar(const void *p, int64_t i, int is_bf16) {
    return is_bf16 ? scalar_from_bf16(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
INLINE void store_scalar(void *p, int64_t i, float x, int is_bf16) {
    if (is_bf16) ((bf16 *)p)[i] = scalar_to_bf16(x);
    else ((float *)p)[i] = x;
}

// A unit is 4 bytes that meet in one lane of a dot product: two bf16, four int8, or one float.
INLINE vf dot_bf16(vf sum, vi a, vi b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & -65536) * (vf)(b & -65536);
#endif
}
INLINE vf dot_float(vf sum, vi a, vi b) { return sum + (vf)a * (vf)b; }

// Four products of an unsigned (u) and a signed (s) byte.
INLINE vi dot_int8(vi sum, vi s, vi u) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#else
    for (int shift = 0; shift < 32; shift += 8) sum += ((s << (24 - shift)) >> 24) * ((u >> shift) & 255);
    return sum;
#endif
}
INLINE vi dot_uint8(vi sum, vi u, vi s) { return dot_int8(sum, s, u); }

// The larger of the two in each lane; b where one of them is NaN.
#ifdef __AVX512F__
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE vf vmax(vf a, vf b) { for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i]; return a; }
INLINE float sum_of(vf x) { float s = 0; for (int i = 0; i < LANES; i++) s += x[i]; return s; }
INLINE float max_of(vf x) { float m = x[0]; for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m; return m; }
#endif

// 2^x for x <= 126, by a polynomial of degree 6 on [-0.5, 0.5] (relative error 2e-7); 2^-126 below -126; NaN stays NaN.
INLINE vf exp2_of(vf x) {
    x = vmax(splat(-126.f), x);
    vf shifted = x + splat(12582912.f);  // 1.5 * 2^23: rounds to a whole number
    vf r = x - (shifted - splat(12582912.f));
    vf y = splat(1.535336188319500e-4f);
    y = y * r + splat(1.339887440266574e-3f);
    y = y * r + splat(9.618437357674640e-3f);
    y = y * r + splat(5.550332471162809e-2f);
    y = y * r + splat(2.402264791363012e-1f);
    y = y * r + splat(6.931472028550421e-1f);
    y = y * r + splat(1.f);
    return y * (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
}
INLINE vf exp_of(vf x) { return exp2_of(x * splat(1.44269504088896341f)); }

typedef uint8_t bytes __attribute__((vector_size(16), aligned(1)));

// Quantises a row x [n] to bytes from -most to most, plus a bias. Returns the scale that the row was divided by; NaN if a
// value is not finite. n is a multiple of 16.
INLINE float quantize(const void *x, void *q, int64_t n, float most, int bias, const int is_bf16) {
    vf largest = {0}, poison = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = load(x, i, is_bf16);
        largest = vmax(vmax(largest, v), -v);
        poison += v - v;
    }
    float scale = max_of(largest) / most + sum_of(poison);
    vf inverse = splat(scale > 0 ? 1.f / scale : 0.f), magic = splat(12582912.f);  // 1.5 * 2^23: rounds
    for (int64_t i = 0; i < n; i += LANES) {
        vi whole = (vi)(load(x, i, is_bf16) * inverse + magic) - 0x4b400000 + bias;
        *(bytes *)((char *)q + i) = __builtin_convertvector(whole, bytes);
    }
    return scale;
}
