// All layers of a decoder in one call, kernel after kernel as the layers of the Python side call them. A decode
// step of a small model is some three hundred kernels of 0.1 ms, and between any two of them the interpreter
// takes its time and may have to wait for its lock.
#include "kernels.h"
#include "vec.h"

// The structures are those of decoder_layers.py, field by field.
typedef struct {
    const void *packed, *bias;  // bias: NULL for none
    const float *scales;        // of int8; else NULL
    int64_t outputs, inputs;
} Product;

typedef struct {
    Product qkv, output, gate_up, down;
    const void *input_norm, *mlp_norm;
    void *k_cache, *v_cache;  // [blocks, kv_heads, block_size, head_size], or quantised
    int64_t heads, kv_heads, head_size, block_size, cache_type, window, group;
    float scale, soft_cap, input_eps, mlp_eps;
} Layer;

// What the layers of one KV group share.
typedef struct {
    const int64_t *slots;     // [tokens]
    const int32_t *tables;    // [sequences, table_width]
    const int32_t *contexts;  // [sequences]
    const int32_t *starts;    // [sequences + 1]
    int64_t table_width, sequences;
} Batch;

// hidden, residual: what a layer gets and leaves is their sum, [tokens, hidden_size] each; norm as large. wide and
// narrow hold the widest of what goes into attention and activation, and of what comes out.
typedef struct {
    void *hidden, *residual, *norm, *wide, *narrow;
    const float *cos, *sin;  // [tokens, head_size]
    int64_t tokens, hidden_size, type, threads;
} State;

static int64_t multiply(const State *s, const Product *p, const void *x, void *out) {
#ifdef __AVX512VNNI__
    if (p->scales)
        return octavo_linear_int8(x, p->packed, p->scales, p->bias, out, s->tokens, p->outputs, p->inputs, s->type,
                                  s->threads);
#endif
    octavo_linear(x, p->packed, p->bias, out, s->tokens, p->outputs, p->inputs, s->type, s->threads);
    return 0;
}

static int64_t attend(const State *s, const Layer *l, const Batch *b) {
    octavo_rope_store(s->wide, s->cos, s->sin, l->k_cache, l->v_cache, b->slots, s->tokens, l->heads, l->kv_heads,
                      l->head_size, l->block_size, s->type, l->cache_type, s->threads);
    return octavo_paged_attention(s->wide, s->narrow, l->k_cache, l->v_cache, b->tables, b->contexts, b->starts,
                                  l->qkv.outputs, l->head_size, b->table_width, b->sequences, l->heads, l->kv_heads,
                                  l->block_size, l->head_size, l->window, l->scale, l->soft_cap, s->type, l->cache_type,
                                  s->threads);
}

static int64_t run_layer(const State *s, const Layer *l, const Batch *b) {
    if (multiply(s, &l->qkv, s->norm, s->wide) || attend(s, l, b) || multiply(s, &l->output, s->narrow, s->hidden))
        return -1;
    octavo_rms_norm(s->hidden, s->residual, l->mlp_norm, s->norm, s->residual, s->tokens, s->hidden_size, l->mlp_eps,
                    s->type, s->threads);
    if (multiply(s, &l->gate_up, s->norm, s->wide))
        return -1;
    octavo_silu_and_mul(s->wide, s->narrow, s->tokens, l->down.inputs, s->type, s->threads);
    return multiply(s, &l->down, s->narrow, s->hidden);
}

// The first layer's input stands in `residual` alone. Returns -1 when there is no memory.
EXPORT int64_t octavo_decoder_layers(const State *s, const Layer *layers, int64_t count, const Batch *batches) {
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = layers + i;
        octavo_rms_norm(i ? s->hidden : s->residual, i ? s->residual : NULL, l->input_norm, s->norm,
                        i ? s->residual : NULL, s->tokens, s->hidden_size, l->input_eps, s->type, s->threads);
        if (run_layer(s, l, batches + l->group))
            return -1;
    }
    return 0;
}
