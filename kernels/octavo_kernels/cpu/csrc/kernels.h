// The kernels that another one calls, with the shapes that stand where they are defined.
#pragma once
#include <stdint.h>

void octavo_rms_norm(const void *x, const void *residual, const void *weight, void *norm, void *sum, int64_t rows,
                     int64_t size, float eps, int64_t type, int64_t threads);
void octavo_rope_store(void *qkv, const float *cos, const float *sin, void *k_cache, void *v_cache,
                       const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_size,
                       int64_t block_size, int64_t type, int64_t cache_type, int64_t threads);
int64_t octavo_paged_attention(const void *q, void *out, const void *k_cache, const void *v_cache,
                               const int32_t *tables, const int32_t *contexts, const int32_t *starts, int64_t q_row,
                               int64_t q_head, int64_t table_width, int64_t sequences, int64_t heads,
                               int64_t kv_heads, int64_t block_size, int64_t head_size, int64_t window, float scale,
                               float soft_cap, int64_t type, int64_t cache_type, int64_t threads);
void octavo_silu_and_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t type, int64_t threads);
void octavo_linear(const void *x, const void *packed, const void *bias, void *out, int64_t rows, int64_t outputs,
                   int64_t inputs, int64_t type, int64_t threads);
int64_t octavo_linear_int8(const void *x, const void *packed, const float *scales, const void *bias, void *out,
                           int64_t rows, int64_t outputs, int64_t inputs, int64_t type, int64_t threads);
