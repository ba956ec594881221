// The largest logit of each row.
#include "pool.h"
#include "vec.h"

typedef struct {
    const void *logits;
    int64_t *ids;
    float *best;
    int64_t size, type;
} Best;

INLINE void best_of_row(const Best *b, int64_t row, int type) {
    const void *logits = at(b->logits, row * b->size, type);
    VecInt index = lane_numbers(), best_index = index, nan = {0};
    Vec best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= b->size; i += LANES) {
        const Vec v = load(logits, i, type);
        const VecInt better = v > best;
        best = blend(better, v, best);
        best_index = (better & index) | (~better & best_index);
        nan |= v != v;
        index += LANES;
    }
    float lanes[LANES], value = -INFINITY;
    int32_t lane_index[LANES], is_nan[LANES], id = INT32_MAX;
    store_f32(lanes, best);
    memcpy(lane_index, &best_index, sizeof lane_index);
    memcpy(is_nan, &nan, sizeof is_nan);
    int any_nan = 0;
    for (int lane = 0; lane < LANES; lane++) {
        if (lanes[lane] > value || (lanes[lane] == value && lane_index[lane] < id)) {
            value = lanes[lane];
            id = lane_index[lane];
        }
        any_nan |= is_nan[lane];
    }
    for (; i < b->size; i++) {
        const float v = type == F32 ? ((const float *)logits)[i] : load_part(logits, i, 1, type)[0];
        any_nan |= v != v;
        if (v > value) {
            value = v;
            id = (int32_t)i;
        }
    }
    b->ids[row] = id < b->size ? id : 0;  // a row of nothing but -inf: the first
    b->best[row] = any_nan ? NAN : value;
}

static void best_task(void *context, int64_t row) {
    const Best *b = context;
    if (b->type == BF16)
        best_of_row(b, row, BF16);
    else
        best_of_row(b, row, F32);
}

// logits [rows, size], size below 2^31; ids, best [rows].
EXPORT void octavo_best_token(const void *logits, int64_t *ids, float *best, int64_t rows, int64_t size,
                              int64_t type, int64_t threads) {
    Best b = {logits, ids, best, size, type};
    parallel_for(threads, rows, best_task, &b);
}
