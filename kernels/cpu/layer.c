// A whole decoder layer in one call: x + attention(norm(x)), then x + mlp(norm(x)).
#include "kernels.h"

typedef struct {
    Linear qkv, out, gate_up, down;  // their x, y, m, scratch and strides are set here
    Attention attention;             // so are its step, query, key, value, out and strides
    const void *norm1, *norm2;       // [width]
    int64_t width;
    float eps1, offset1, eps2, offset2;
} Layer;

static void apply(Linear *l, const void *x, void *y, int64_t m, char *scratch) {
    l->x = x, l->y = y, l->m = m, l->x_stride = l->k, l->y_stride = l->epilogue == PLAIN ? l->n : l->n / 2;
    l->scratch = scratch;
    linear(l);
}

// x [m, width] -> y [m, width]. `scratch` has room for m rows each of qkv, the attention's output, a normalised x and the
// MLP's inner layer, all in the dtype of x, and for m * (K + 4) bytes of the widest product.
void decoder_layer(Layer *layer, const Step *step, const char *x, char *y, char *scratch) {
    Attention *a = &layer->attention;
    const int64_t m = step->num_tokens, size = a->is_bf16 ? 2 : 4, width = layer->width;
    char *qkv = scratch, *attended = qkv + m * layer->qkv.n * size, *normed = attended + m * layer->out.k * size;
    char *inner = normed + m * width * size, *bytes = inner + m * layer->down.k * size;
    rms_norm(x, 0, layer->norm1, normed, m, width, width, layer->eps1, layer->offset1, a->is_bf16);
    apply(&layer->qkv, normed, qkv, m, bytes);
    a->step = step, a->q_stride = a->k_stride = a->v_stride = layer->qkv.n;
    a->query = qkv;
    a->key = qkv + a->heads * a->k_size * size;
    a->value = (const char *)a->key + a->kv_heads * a->k_size * size;
    a->out = attended;
    store_kv(a);
    paged_attention(a);
    apply(&layer->out, attended, y, m, bytes);
    rms_norm(x, y, layer->norm2, normed, m, width, width, layer->eps2, layer->offset2, a->is_bf16);  // y += x
    apply(&layer->gate_up, normed, inner, m, bytes);
    apply(&layer->down, inner, normed, m, bytes);
    add_rows(y, normed, m * width, a->is_bf16);
}
