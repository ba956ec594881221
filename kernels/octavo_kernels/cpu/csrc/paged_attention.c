// Causal attention over a paged cache, read where it lies: online softmax (arXiv 2205.14135) in float32.
//
// A task is some queries of one sequence, with all the query heads that share one KV head, so that keys and
// values are read once for all of them. When there are few tasks their keys are divided as well, and the parts
// are joined at the end (Flash-Decoding).
#include <stdlib.h>

#include "attention.h"
#include "pool.h"

#define ROWS_WANTED 32    // rows of a task, for prompts: what a converted tile of keys is used for
#define TASKS_PER_THREAD 4
#define KEYS_PER_PART 256  // at least, when keys are divided

typedef struct {
    const void *q;
    void *out;
    const void *k_cache, *v_cache;
    const int32_t *tables, *contexts, *starts;  // [S, table_width], [S], [S + 1]
    int64_t q_row, q_head, table_width, sequences, heads, kv_heads, block_size, head_size, window, type;
    float scale, soft_cap;
    // Worked out of the above.
    int64_t group, queries_per_task, parts;
    const int64_t *first_task;  // [S + 1] of each sequence, before heads and parts
    float *partial;             // [tasks, rows, head_size + 2] when keys are divided
    int64_t max_rows;
} Attention;

typedef struct {
    int64_t sequence, head, query, queries, rows, position;  // of the first query, in its sequence
    int64_t first_key, end_key;
} Work;

// Running state of the rows' softmaxes.
typedef struct {
    float out[MAX_ROWS * MAX_HEAD], best[MAX_ROWS], total[MAX_ROWS];
} Rows;

static Work work_of(const Attention *a, int64_t index) {
    const int64_t part = index % a->parts, head = index / a->parts % a->kv_heads;
    const int64_t chunk = index / a->parts / a->kv_heads;
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

// Where a key or value lies. The blocks are in no order, so the processor's own prefetcher loses track at each.
typedef struct {
    const void *cache;
    int64_t head, key;
} Place;

static const char *row_at(const Attention *a, const Work *w, Place place, int64_t key) {
    const int64_t block = a->tables[w->sequence * a->table_width + key / a->block_size];
    const int64_t row = (block * a->kv_heads + place.head) * a->block_size + key % a->block_size;
    return at(place.cache, row * a->head_size, (int)a->type);
}

// Pointers to the tile's rows as floats: into the cache, or into `buffer` where they have to be converted. On
// the way it prefetches as many from where the next tile is, if there is one.
static void gather(const Attention *a, const Work *w, Place here, Place next, int64_t count, float *buffer,
                   const float **rows) {
    const int64_t row_bytes = a->head_size * size_of((int)a->type);
    for (int64_t j = 0; j < count;) {
        const int64_t run = min_i64(count - j, a->block_size - (here.key + j) % a->block_size);
        const char *from = row_at(a, w, here, here.key + j);
        const char *ahead = next.key + j < w->end_key ? row_at(a, w, next, next.key + j) : from;
        float *to = buffer + j * a->head_size;
        if (a->type == BF16) {
            for (int64_t i = 0; i < run * a->head_size; i += LANES) {
                __builtin_prefetch(ahead + i * 2);
                store_f32(to + i, load(from, i, BF16));
            }
            for (int64_t i = 0; i < run; i++)
                rows[j + i] = to + i * a->head_size;
        } else {
            for (int64_t i = 0; i < run; i++) {
                rows[j + i] = (const float *)(from + i * row_bytes);
                for (int64_t line = 0; line < row_bytes; line += 64)
                    __builtin_prefetch(ahead + i * row_bytes + line);
            }
        }
        j += run;
    }
    for (int64_t j = count; j < (count + LANES - 1) / LANES * LANES; j++)
        rows[j] = rows[count - 1];
}

INLINE Vec capped(Vec scores, float cap) {
    const Vec e = exp_vec(scores * (2.0f / cap));
    return cap * (1.0f - 2.0f / (e + 1.0f));  // cap x tanh(score / cap)
}

// Scores of one row and the tile's keys become shares of the softmax so far; what came before is scaled down.
static void score_row(const Attention *a, const Work *w, Rows *rows, int64_t row, const float *q,
                      const float *const *keys, int64_t key, int64_t count, float *shares) {
    const int64_t position = w->position + row / a->group;
    const int64_t first = a->window ? position - a->window + 1 - key : 0;  // the visible, counted in the tile
    const int64_t end = min_i64(count, position + 1 - key);
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    const VecInt lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (end <= 0 || first >= count) {
        memset(shares, 0, (size_t)whole * sizeof *shares);
        return;
    }
    Vec highest = splat(-INFINITY);
    for (int64_t j = 0; j < whole; j += LANES) {
        Vec scores = score_16(q, keys + j, a->head_size);
        if (a->soft_cap > 0)
            scores = capped(scores, a->soft_cap);
        if (j < first || j + LANES > end) {
            const VecInt visible = (lane >= (int32_t)(first - j)) & (lane < (int32_t)(end - j));
            scores = blend(visible, scores, splat(-INFINITY));
        }
        highest = max_vec(scores, highest);
        store_f32(shares + j, scores);
    }
    const float best = fmaxf(rows->best[row], max_lanes(highest));
    if (best > rows->best[row]) {
        const float factor = rows->best[row] == -INFINITY ? 0.0f : expf(rows->best[row] - best);
        rows->total[row] *= factor;
        for (int64_t i = 0; i < a->head_size; i += LANES)
            store_f32(rows->out + row * a->head_size + i, load_f32(rows->out + row * a->head_size + i) * factor);
        rows->best[row] = best;
    }
    Vec total = {0};
    for (int64_t j = 0; j < whole; j += LANES) {
        const Vec share = exp_vec(load_f32(shares + j) - best);
        store_f32(shares + j, share);
        total += share;
    }
    rows->total[row] += sum_lanes(total);
}

static void attend(const Attention *a, const Work *w, Rows *rows) {
    float q[MAX_ROWS * MAX_HEAD], shares[MAX_ROWS * TILE], buffer[TILE * MAX_HEAD];
    const float *pointers[TILE];
    const int64_t size = a->head_size;
    for (int64_t row = 0; row < w->rows; row++) {
        const int64_t head = w->head * a->group + row % a->group;
        const void *from = at(a->q, (w->query + row / a->group) * a->q_row + head * a->q_head, (int)a->type);
        load_all(q + row * size, from, size, a->type);
        for (int64_t i = 0; i < size; i += LANES)
            store_f32(q + row * size + i, load_f32(q + row * size + i) * a->scale);
        rows->best[row] = -INFINITY;
        rows->total[row] = 0;
    }
    memset(rows->out, 0, (size_t)(w->rows * size) * sizeof *rows->out);
    for (int64_t key = w->first_key; key < w->end_key; key += TILE) {
        const int64_t count = min_i64(TILE, w->end_key - key);
        const Place k = {a->k_cache, w->head, key}, v = {a->v_cache, w->head, key};
        const int is_last = key + TILE >= w->end_key;  // then this thread's next task may be the next head
        const Place next = {a->k_cache, min_i64(w->head + is_last, a->kv_heads - 1), is_last ? w->first_key : key + TILE};
        gather(a, w, k, v, count, buffer, pointers);
        for (int64_t row = 0; row < w->rows; row++)
            score_row(a, w, rows, row, q + row * size, pointers, key, count, shares + row * TILE);
        gather(a, w, v, next, count, buffer, pointers);
        add_all_values(rows->out, size, shares, pointers, count, w->rows);
    }
}

static void write_row(const Attention *a, const Work *w, int64_t row, const float *out, float total) {
    const int type = (int)a->type;
    const int64_t head = w->head * a->group + row % a->group;
    void *to = at_mut(a->out, ((w->query + row / a->group) * a->heads + head) * a->head_size, type);
    const float factor = 1.0f / total;
    for (int64_t i = 0; i < a->head_size; i += LANES)
        store(to, i, load_f32(out + i) * factor, type);
}

static void attention_task(void *context, int64_t index) {
    const Attention *a = context;
    Rows rows;
    const Work w = work_of(a, index);
    attend(a, &w, &rows);
    for (int64_t row = 0; row < w.rows; row++) {
        const float *out = rows.out + row * a->head_size;
        if (a->parts == 1) {
            write_row(a, &w, row, out, rows.total[row]);
            continue;
        }
        float *to = a->partial + (index * a->max_rows + row) * (a->head_size + 2);
        to[0] = rows.best[row];
        to[1] = rows.total[row];
        memcpy(to + 2, out, (size_t)a->head_size * sizeof *out);
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
            const float factor = p[1] == 0 ? 0 : expf(p[0] - best);  // a part may see nothing
            total += p[1] * factor;
            for (int64_t i = 0; i < a->head_size; i += LANES)
                store_f32(out + i, load_f32(out + i) + load_f32(p + 2 + i) * factor);
        }
        write_row(a, &w, row, out, total);
    }
}

// q [T, heads, head_size] with strides q_row and q_head; out the same, contiguous. Returns 0, or -1 when there
// is no memory for a few numbers a sequence.
EXPORT int64_t octavo_paged_attention(const void *q, void *out, const void *k_cache, const void *v_cache,
                                      const int32_t *tables, const int32_t *contexts, const int32_t *starts,
                                      int64_t q_row, int64_t q_head, int64_t table_width, int64_t sequences,
                                      int64_t heads, int64_t kv_heads, int64_t block_size, int64_t head_size,
                                      int64_t window, float scale, float soft_cap, int64_t type, int64_t threads) {
    Attention a = {q, out, k_cache, v_cache, tables, contexts, starts, q_row, q_head, table_width, sequences, heads,
                   kv_heads, block_size, head_size, window, type, scale, soft_cap, heads / kv_heads, 1, 1, NULL, NULL, 0};
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
    const int64_t tasks = first_task[sequences] * kv_heads;
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
