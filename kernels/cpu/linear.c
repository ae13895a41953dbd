// y[M, N] = x[M, K] * w[N, K]^T for weights packed once: bf16, or int8 with one scale for each output.
//
// Packed weights lie in panels of 32 outputs: [N / 32][K / u][32][u], u values to a unit (2 bf16, 4 int8). One thread reads
// a panel from memory, once a call; for every further ROWS rows it finds the panel in its cache.
#include "kernels.h"
#include "tile.h"
#include <omp.h>

enum { PANEL = 32 };
DEFINE_TILE(tile_bf16, BF16)
DEFINE_TILE(tile_int8, INT8)

// x / (1 + exp(-z)): SiLU has z = x; for tanh-approximated GELU tanh(a) = 2 sigmoid(2 a) - 1.
INLINE vf activate(vf x, int gelu) {
    vf z = gelu ? splat(1.5957691216057308f) * (x + splat(0.044715f) * x * x * x) : x;
    return x / (splat(1.f) + exp_of(-vmax(z, splat(-80.f))));
}

// Finishes 32 sums of one row: scales them, adds the bias, gates, and writes them.
INLINE void finish(const Linear *l, float x_scale, int64_t row, int64_t panel, const vi *sums, const int is_bf16) {
    char *out = (char *)l->y + row * l->y_stride * (is_bf16 ? 2 : 4);
    vf y[2];
    for (int half = 0; half < 2; half++) {
        int64_t column = panel * PANEL + half * LANES;
        y[half] = (vf)sums[half];
        if (l->is_int8) {
            vi exact = sums[half] - load_units(l->offset + column);
            y[half] = __builtin_convertvector(exact, vf) * load(l->w_scale, column, 0) * splat(x_scale);
        }
        if (l->bias) y[half] += load(l->bias, column, 0);
        y[half] = rounded(y[half], is_bf16);
    }
    if (l->epilogue != PLAIN) {
        vf gate = activate(y[0], l->epilogue == GELU_MUL);
        store(out, panel * LANES, rounded(gate, is_bf16) * y[1], is_bf16);
        return;
    }
    for (int half = 0; half < 2; half++) {
        int64_t column = panel * PANEL + half * LANES, left = l->n - column;
        if (left >= LANES) store(out, column, y[half], is_bf16);
        else for (int64_t i = 0; i < left; i++) store_scalar(out, column + i, y[half][i], is_bf16);
    }
}

void linear(const Linear *l) {
    const int64_t units = l->k / (l->is_int8 ? 4 : 2), panel_bytes = units * PANEL * 4;
    const int64_t panels = (l->n + PANEL - 1) / PANEL, tiles = (l->m + ROWS - 1) / ROWS;
    const char *x = l->x;
    int64_t x_bytes = l->x_stride * 2;  // between rows
    const float *scales = (const float *)l->scratch;
    if (l->is_int8) {
        uint8_t *q = (uint8_t *)(l->scratch + l->m * sizeof(float));
        quantize_rows(l->x, q, (float *)l->scratch, l->m, l->k, l->x_stride, l->is_bf16);
        x = (const char *)q, x_bytes = l->k;
    }
    int64_t together = panels / (3 * omp_get_max_threads());  // panels a thread takes at a time: it prefetches the next
    together = together < 1 ? 1 : together > 4 ? 4 : together;
#pragma omp parallel for schedule(dynamic, together)
    for (int64_t panel = 0; panel < panels; panel++) {
        const char *w = (const char *)l->w + panel * panel_bytes;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = t * l->m / tiles, rows = (t + 1) * l->m / tiles - row;
            int64_t ahead = t == tiles - 1 && panel + 1 < panels ? panel_bytes : 0;
            vi sums[ROWS][2];
            (l->is_int8 ? tile_int8 : tile_bf16)(x + row * x_bytes, x_bytes, w, PANEL * 4, 64, ahead, units, sums, rows);
            for (int64_t r = 0; r < rows; r++) {
                float scale = l->is_int8 ? scales[row + r] : 1.f;
                if (l->is_bf16) finish(l, scale, row + r, panel, sums[r], 1);
                else finish(l, scale, row + r, panel, sums[r], 0);
            }
        }
    }
}

// Whether this CPU has instructions for products of bf16; without them float32 is faster.
int multiplies_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
