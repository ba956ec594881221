// The gated activation between an MLP's two products.
#include "pool.h"
#include "vec.h"

#define CHUNK 4096  // numbers of one row that a task does
#define SERIAL_NUMBERS 16384

typedef struct {
    const void *gate_up;
    void *out;
    int64_t size, chunks, type;  // chunks of a row
} Silu;

INLINE Vec silu_times(Vec gate, Vec up) { return gate / (1.0f + exp_vec(-gate)) * up; }

INLINE void silu_chunk(const Silu *s, int64_t row, int64_t begin, int64_t end, int type) {
    const void *gate = at(s->gate_up, row * 2 * s->size, type), *up = at(gate, s->size, type);
    void *out = at_mut(s->out, row * s->size, type);
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store(out, i, silu_times(load(gate, i, type), load(up, i, type)), type);
    if (i < end)
        store_part(out, i, end - i, silu_times(load_part(gate, i, end - i, type), load_part(up, i, end - i, type)), type);
}

static void silu_task(void *context, int64_t index) {
    const Silu *s = context;
    const int64_t row = index / s->chunks, begin = index % s->chunks * CHUNK;
    const int64_t end = min_i64(s->size, begin + CHUNK);
    if (s->type == BF16)
        silu_chunk(s, row, begin, end, BF16);
    else
        silu_chunk(s, row, begin, end, F32);
}

// gate_up [rows, 2 size], gate first; out [rows, size].
EXPORT void octavo_silu_and_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t type,
                                int64_t threads) {
    Silu s = {gate_up, out, size, (size + CHUNK - 1) / CHUNK, type};
    parallel_for(rows * size < SERIAL_NUMBERS ? 1 : threads, rows * s.chunks, silu_task, &s);
}
