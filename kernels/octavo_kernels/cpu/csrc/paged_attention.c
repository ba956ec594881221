// Causal attention over a paged cache, read where it lies: online softmax (arXiv 2205.14135) in float32.
//
// A task is some queries of one sequence, with all the query heads that share one KV head, so that keys and
// values are read once for all of them. When there are few tasks their keys are divided as well, and the parts
// are joined at the end (Flash-Decoding).
#include <stdlib.h>

#include "attention_bf16.h"
#include "attention_f32.h"
#include "pool.h"

#define ROWS_WANTED 48    // rows of a task, for prompts: what a converted tile of keys is used for
#define TASKS_PER_THREAD 4
#define KEYS_PER_PART 256  // at least, when keys are divided

static Work work_of(const Attention *a, int64_t index) {
    const int64_t groups = a->kv_heads / a->heads_per_task, part = index % a->parts;
    const int64_t head = index / a->parts % groups * a->heads_per_task, chunk = index / a->parts / groups;
    int64_t low = 0, high = a->sequences;  // the last sequence that begins at or before the chunk
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (a->first_task[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    Work w = {.sequence = low, .head = head};
    const int64_t offset = (chunk - a->first_task[low]) * a->queries_per_task;
    const int64_t count = a->starts[low + 1] - a->starts[low];
    w.query = a->starts[low] + offset;
    w.queries = min_i64(a->queries_per_task, count - offset);
    w.rows = w.queries * a->group;
    w.position = a->contexts[low] - count + offset;
    int64_t first = a->window ? max_i64(0, w.position - a->window + 1) : 0;
    const int64_t keys = w.position + w.queries - first;
    const int64_t size = (keys + a->parts - 1) / a->parts;
    w.first_key = first + min_i64(keys, part * size);
    w.end_key = first + min_i64(keys, (part + 1) * size);
    return w;
}

// Where the rows of a tile of keys lie in either cache, in bytes; filled up to a multiple of 16 with the last.
// Returns how many there are.
static int64_t locate(const Attention *a, const Work *w, int64_t key, int64_t head, int64_t *offsets) {
    const int64_t count = min_i64(TILE, w->end_key - key), row_bytes = a->head_size * size_of((int)a->cache_type);
    const int64_t bytes = tile_bytes(a->block_size, a->head_size, (int)a->cache_type);
    const int32_t *table = a->tables + w->sequence * a->table_width;
    int64_t block = key / a->block_size, slot = key % a->block_size;
    for (int64_t j = 0; j < count; block++, slot = 0) {
        int64_t offset = (table[block] * a->kv_heads + head) * bytes + slot * row_bytes;
        for (int64_t end = min_i64(count, j + a->block_size - slot); j < end; j++, offset += row_bytes)
            offsets[j] = offset;
    }
    for (int64_t j = count; j % LANES; j++)
        offsets[j] = offsets[count - 1];
    return count;
}

// Blocks are in no order, so the processor's own prefetcher loses track at each. The scales of a quantised block lie
// behind its last row.
static void prefetch_rows(const Attention *a, const char *cache, const int64_t *offsets, int64_t count) {
    const int64_t bytes = tile_bytes(1, a->head_size, (int)a->cache_type);
    for (int64_t j = 0; j < count; j++)
        for (int64_t line = 0; line < bytes; line += 64)
            prefetch(cache + offsets[j] + line);
}

static Products products_of(const Attention *a) {
#ifdef __AVX512BF16__
    if (a->type == BF16 && a->head_size % PAIRS == 0)
        return (Products){take_query_bf16, score_bf16, add_bf16, finish_bf16};
#endif
    (void)a;
    return (Products){take_query_f32, score_f32, add_f32, finish_f32};
}

// `next_head` is whether the same thread goes on with the next KV head.
static void attend(const Attention *a, const Work *w, Rows *rows, Scratch *s, int next_head) {
    const Products *products = &a->products;
    for (int64_t row = 0; row < w->rows; row++) {
        const int64_t head = w->head * a->group + row % a->group;
        products->take_query(a, s, row,
                             at(a->q, (w->query + row / a->group) * a->q_row + head * a->q_head, (int)a->type));
        rows->best[row] = -INFINITY;
        store_f32(rows->total + row * LANES, (Vec){0});
    }
    memset(rows->out, 0, (size_t)(w->rows * a->head_size) * sizeof *rows->out);
    locate(a, w, w->first_key, w->head, s->offsets[0]);
    for (int64_t key = w->first_key, tile = 0; key < w->end_key; key += TILE, tile++) {
        const int64_t count = min_i64(TILE, w->end_key - key), *here = s->offsets[tile % 2];
        int64_t *next = s->offsets[(tile + 1) % 2];
        prefetch_rows(a, a->v_cache, here, count);
        products->score(a, w, rows, s, here, key, count);
        if (key + TILE < w->end_key)
            prefetch_rows(a, a->k_cache, next, locate(a, w, key + TILE, w->head, next));
        else if (next_head)
            prefetch_rows(a, a->k_cache, next, locate(a, w, w->first_key, w->head + 1, next));
        products->add(a, w, rows, s, here, count);
    }
    for (int64_t row = 0; row < w->rows; row++)
        products->finish(a, rows->out + row * a->head_size);
}

static void write_row(const Attention *a, const Work *w, int64_t row, const float *out, float total) {
    const int type = (int)a->type;
    const int64_t head = w->head * a->group + row % a->group;
    void *to = at_mut(a->out, ((w->query + row / a->group) * a->heads + head) * a->head_size, type);
    const float factor = total == 0 ? 0 : 1.0f / total;  // no keys at all: a row that only pads the batch
    for (int64_t i = 0; i < a->head_size; i += LANES)
        store(to, i, load_f32(out + i) * factor, type);
}

static void attention_task(void *context, int64_t index) {
    const Attention *a = context;
    Rows rows;
    Scratch scratch;
    Work w = work_of(a, index);
    for (int64_t left = a->heads_per_task; left--; w.head++) {
        attend(a, &w, &rows, &scratch, left > 0);
        for (int64_t row = 0; row < w.rows; row++) {
            const float *out = rows.out + row * a->head_size, total = sum_lanes(load_f32(rows.total + row * LANES));
            if (a->parts == 1) {
                write_row(a, &w, row, out, total);
                continue;
            }
            float *to = a->partial + (index * a->max_rows + row) * (a->head_size + 2);
            to[0] = rows.best[row];
            to[1] = total;
            memcpy(to + 2, out, (size_t)a->head_size * sizeof *out);
        }
    }
}

// Joins the parts of every row of one task's queries.
static void join_task(void *context, int64_t index) {
    const Attention *a = context;
    const Work w = work_of(a, index * a->parts);
    const int64_t stride = a->head_size + 2;
    for (int64_t row = 0; row < w.rows; row++) {
        const float *first = a->partial + (index * a->parts * a->max_rows + row) * stride;
        float best = -INFINITY, total = 0, out[MAX_HEAD] = {0};
        for (int64_t part = 0; part < a->parts; part++)
            best = fmaxf(best, first[part * a->max_rows * stride]);
        for (int64_t part = 0; part < a->parts; part++) {
            const float *p = first + part * a->max_rows * stride;
            const float factor = p[1] == 0 ? 0 : exp2f(p[0] - best);  // a part may see nothing
            total += p[1] * factor;
            for (int64_t i = 0; i < a->head_size; i += LANES)
                store_f32(out + i, load_f32(out + i) + load_f32(p + 2 + i) * factor);
        }
        write_row(a, &w, row, out, total);
    }
}

// q [T, heads, head_size] with strides q_row and q_head; out the same, contiguous; caches of `type`, or quantised. Returns 0, or -1 when there
// is no memory for a few numbers a sequence.
EXPORT int64_t octavo_paged_attention(const void *q, void *out, const void *k_cache, const void *v_cache,
                                      const int32_t *tables, const int32_t *contexts, const int32_t *starts,
                                      int64_t q_row, int64_t q_head, int64_t table_width, int64_t sequences,
                                      int64_t heads, int64_t kv_heads, int64_t block_size, int64_t head_size,
                                      int64_t window, float scale, float soft_cap, int64_t type,
                                      int64_t cache_type, int64_t threads) {
    Attention a = {.q = q, .out = out, .k_cache = k_cache, .v_cache = v_cache, .tables = tables,
                   .contexts = contexts, .starts = starts, .q_row = q_row, .q_head = q_head,
                   .table_width = table_width, .sequences = sequences, .heads = heads, .kv_heads = kv_heads,
                   .block_size = block_size, .head_size = head_size, .window = window, .type = type,
                   .cache_type = cache_type, .scale = scale, .soft_cap = soft_cap, .group = heads / kv_heads, .heads_per_task = 1, .parts = 1};
    a.products = products_of(&a);
    a.queries_per_task = max_i64(1, ROWS_WANTED / a.group);
    int64_t *first_task = malloc((size_t)(sequences + 1) * sizeof *first_task);
    if (!first_task)
        return -1;
    int64_t longest = 0;
    first_task[0] = 0;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t count = starts[s + 1] - starts[s];
        first_task[s + 1] = first_task[s] + (count + a.queries_per_task - 1) / a.queries_per_task;
        longest = max_i64(longest, window ? min_i64(window + a.queries_per_task, contexts[s]) : contexts[s]);
        a.max_rows = max_i64(a.max_rows, min_i64(count, a.queries_per_task) * a.group);
    }
    a.first_task = first_task;
    if (first_task[sequences] >= 2 * TASKS_PER_THREAD * threads)
        a.heads_per_task = kv_heads;  // they lie side by side
    const int64_t tasks = first_task[sequences] * kv_heads / a.heads_per_task;
    if (threads > 1 && tasks < TASKS_PER_THREAD * threads) {
        a.parts = min_i64(TASKS_PER_THREAD * threads / tasks, max_i64(1, longest / KEYS_PER_PART));
        if (a.parts > 1)
            a.partial = malloc((size_t)(tasks * a.parts * a.max_rows * (head_size + 2)) * sizeof *a.partial);
        if (!a.partial)
            a.parts = 1;
    }
    parallel_for(threads, tasks * a.parts, attention_task, &a);
    if (a.parts > 1)
        parallel_for(1, tasks, join_task, &a);
    free(a.partial);
    free(first_task);
    return 0;
}
