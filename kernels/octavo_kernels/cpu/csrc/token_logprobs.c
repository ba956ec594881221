// Log-probabilities of one token of each row, and of the row's best.
#include <stdatomic.h>
#include <stdlib.h>

#include "logits.h"
#include "pool.h"

typedef struct {
    const void *logits;
    const int64_t *ids;
    float *logprobs, *best;
    int64_t *ranks, *best_ids, *best_ranks;
    int64_t num_best, stride, size, type;
    _Atomic int out_of_memory;
} Logprobs;

// The logarithm of the sum of the exponentials, less the row's maximum; and how many logits are above `logit`.
INLINE double log_sum(const Row *r, float logit, int64_t *above, int type) {
    double total = 0;
    VecInt counts = {0};
    for (int64_t tile = 0; tile < r->tiles; tile++) {
        Vec sum = {0};
        for (int64_t i = tile * TILE; i < (tile + 1) * TILE; i += LANES) {
            const Vec v = load_logits(r, i, type);
            sum += exp_vec(v - r->largest);
            counts -= v > logit;  // true is -1
        }
        total += sum_lanes(sum);
    }
    *above = 0;
    for (int lane = 0; lane < LANES; lane++)
        *above += counts[lane];
    return log(total);
}

static void write_best(const Logprobs *l, int64_t row, const Row *r, double log_total, const uint64_t *entries) {
    for (int64_t i = 0, to = row * l->num_best; i < l->num_best; i++, to++) {
        const float logit = logit_of(entries[i]);
        l->best_ids[to] = id_of(entries[i]);
        l->best[to] = (float)((double)logit - r->largest - log_total);
        l->best_ranks[to] = i && logit == logit_of(entries[i - 1]) ? l->best_ranks[to - 1] : i + 1;
    }
}

INLINE void logprobs_of_row(Logprobs *l, int64_t row, int type) {
    const int64_t tiles = tiles_of(l->size), list = l->num_best ? tiles * TILE : 0;
    // Two lists of entries, then the groups.
    uint64_t *entries = malloc(2 * (size_t)list * sizeof *entries + (size_t)(tiles * LANES) * sizeof(float));
    if (!entries) {
        l->out_of_memory = 1;
        return;
    }
    Row r = {at(l->logits, row * l->stride, type), l->size, tiles, (float *)(entries + 2 * list), 0};
    find_maxima(&r, type);
    const float logit = load_part(r.logits, l->ids[row], 1, type)[0];
    int64_t above;
    const double log_total = log_sum(&r, logit, &above, type);
    l->logprobs[row] = (float)((double)logit - r.largest - log_total);
    l->ranks[row] = above + 1;
    if (l->num_best) {
        const int64_t count = collect(&r, distance_holding(&r, NULL, (double)l->num_best), entries, type);
        write_best(l, row, &r, log_total, sort_entries(entries, entries + list, count));
    }
    free(entries);
}

static void logprobs_task(void *context, int64_t index) {
    Logprobs *l = context;
    if (l->type == BF16)
        logprobs_of_row(l, index, BF16);
    else
        logprobs_of_row(l, index, F32);
}

// logits [rows, size] with a distance of `stride` between rows, size in [1, 2^31); ids, logprobs, ranks [rows], ids
// in [0, size); the others [rows, num_best], num_best up to size. Returns -1 when there is no memory.
EXPORT int64_t octavo_token_logprobs(const void *logits, const int64_t *ids, float *logprobs, int64_t *ranks,
                                     int64_t *best_ids, float *best, int64_t *best_ranks, int64_t num_best,
                                     int64_t rows, int64_t stride, int64_t size, int64_t type, int64_t threads) {
    Logprobs l = {logits, ids, logprobs, best, ranks, best_ids, best_ranks, num_best, stride, size, type, 0};
    parallel_for(threads, rows, logprobs_task, &l);
    return l.out_of_memory ? -1 : 0;
}
