// Operations on rows: normalise, quantise, add.
#include "kernels.h"
#include "simd.h"

enum { WORTH_SHARING = 1 << 14 };  // values; below, one thread is done before another has woken up

// y = h / sqrt(mean(h^2) + eps) * (weight + offset), h = x + residual if there is one, which it replaces.
// x, y, residual [rows, n], weight [n], all bf16 or float32; n a multiple of 16; rows of x lie x_stride values apart.
INLINE void norm_row(const void *x, void *residual, const void *weight, void *y, int64_t n, float eps, float offset,
                     const int is_bf16) {
    vf squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vf h = load(x, i, is_bf16);
        if (residual) {
            store(residual, i, h + load(residual, i, is_bf16), is_bf16);
            h = load(residual, i, is_bf16);
        }
        squares += h * h;
    }
    vf scale = splat(1.f / sqrtf(sum_of(squares) / n + eps));
    const void *h = residual ? residual : x;
    for (int64_t i = 0; i < n; i += LANES)
        store(y, i, load(h, i, is_bf16) * scale * (load(weight, i, is_bf16) + splat(offset)), is_bf16);
}

void rms_norm(const char *x, char *residual, const void *weight, char *y, int64_t rows, int64_t n, int64_t x_stride,
              float eps, float offset, int64_t is_bf16) {
    int64_t size = is_bf16 ? 2 : 4, width = n * size;
#pragma omp parallel for if (rows * n > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++) {
        const char *from = x + r * x_stride * size;
        char *kept = residual ? residual + r * width : 0, *to = y + r * width;
        if (is_bf16) norm_row(from, kept, weight, to, n, eps, offset, 1);
        else norm_row(from, kept, weight, to, n, eps, offset, 0);
    }
}

// x [rows, n] bf16 or float32 -> q [rows, n], biased by 128, and scales [rows]; n a multiple of 16.
void quantize_rows(const char *x, uint8_t *q, float *scales, int64_t rows, int64_t n, int64_t x_stride, int64_t is_bf16) {
#pragma omp parallel for if (rows * n > WORTH_SHARING)
    for (int64_t r = 0; r < rows; r++)
        scales[r] = is_bf16 ? quantize(x + r * x_stride * 2, q + r * n, n, 127.f, 128, 1)
                            : quantize(x + r * x_stride * 4, q + r * n, n, 127.f, 128, 0);
}

// x += y, n values in all; n a multiple of 16.
void add_rows(char *x, const char *y, int64_t n, int64_t is_bf16) {
#pragma omp parallel for if (n > WORTH_SHARING)
    for (int64_t i = 0; i < n; i += LANES) {
        if (is_bf16) store(x, i, load(x, i, 1) + load(y, i, 1), 1);
        else store(x, i, load(x, i, 0) + load(y, i, 0), 0);
    }
}
