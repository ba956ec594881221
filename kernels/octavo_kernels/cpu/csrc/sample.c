// Draws a token from each row of logits.
//
// A token's weight is its probability over that of the best. A row that neither top-k nor top-p cuts is never
// sorted: the point drawn is looked up first among the tiles' weights, then inside one tile. A row that is cut is
// drawn from its best tokens in falling order, of which no more are collected and sorted than may be kept.
#include <stdatomic.h>
#include <stdlib.h>

#include "logits.h"
#include "pool.h"

typedef struct {
    const void *logits;
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const double *uniforms;
    int64_t *ids;
    int64_t stride, size, type;
    _Atomic int out_of_memory;
} Sample;

typedef struct {
    Row row;
    float temperature, min_p;
    double uniform;
} Draw;

INLINE Vec weights_of(const Draw *d, Vec logits) {
    // The difference is taken before the quotient, which could overflow.
    const Vec weights = exp_vec((logits - d->row.largest) / d->temperature);
    return blend(weights < d->min_p, (Vec){0}, weights);
}

INLINE float weight_of_tile(const Draw *d, int64_t tile, int type) {
    Vec sum = {0};
    for (int64_t i = tile * TILE; i < (tile + 1) * TILE; i += LANES)
        sum += weights_of(d, load_logits(&d->row, i, type));
    return sum_lanes(sum);
}

// A place among numbers that follow each other: which of them, and how far through it.
typedef struct {
    int64_t index;
    double through;  // [0, 1]
} Place;

// The number that holds the point `share` of the way through all, whose sum is `total`. Rounding may take the point
// to the very end, which belongs to the last number above 0.
static inline Place place_of(const float *numbers, int64_t count, double total, double share) {
    const double point = share * total;
    double before = 0, end = 0;
    int64_t index = 0;
    for (int64_t i = 0; i < count && end <= point; i++)
        if (numbers[i] > 0) {
            index = i;
            before = end;
            end += numbers[i];
        }
    return (Place){index, fmin(fmax((point - before) / (end - before), 0), 1)};
}

static inline double sum_of(const float *numbers, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += numbers[i];
    return sum;
}

// `tiles` [row.tiles] is for its own use.
INLINE int64_t draw_unsorted(const Draw *d, float *tiles, int type) {
    for (int64_t tile = 0; tile < d->row.tiles; tile++)
        tiles[tile] = weight_of_tile(d, tile, type);
    const Place tile = place_of(tiles, d->row.tiles, sum_of(tiles, d->row.tiles), d->uniform);
    float weights[TILE];
    for (int64_t i = 0; i < TILE; i += LANES)
        store_f32(weights + i, weights_of(d, load_logits(&d->row, tile.index * TILE + i, type)));
    return tile.index * TILE + place_of(weights, TILE, sum_of(weights, TILE), tile.through).index;
}

// A distance from the maximum within which all lies that top-p keeps: the lesser of two. Within one the groups'
// maxima alone have the share. Beyond the other, which is for flat rows, all would weigh less than what is dropped
// even if each weighed as much as one just there; half of that leaves rounding no say. `weights` [tiles, LANES] is
// for its own use.
static float distance_of_share(const Draw *d, float top_p, double total, float *weights) {
    for (int64_t i = 0; i < d->row.tiles * LANES; i += LANES)
        store_f32(weights + i, weights_of(d, load_f32(d->row.groups + i)));
    const double dropped = 0.5 * (1 - top_p) * total / (double)d->row.size;
    return fminf((float)(-d->temperature * log(dropped)), distance_holding(&d->row, weights, top_p * total));
}

// `entries`, `spare` and `weights` hold a whole row. A `top_k` of 0 is off.
INLINE int64_t draw_sorted(const Draw *d, int64_t top_k, float top_p, uint64_t *entries, uint64_t *spare,
                           float *weights, int type) {
    double total = 0, kept_weight = 0;
    float distance;
    if (top_k) {
        distance = distance_holding(&d->row, NULL, (double)top_k);
    } else {
        for (int64_t tile = 0; tile < d->row.tiles; tile++)
            total += weight_of_tile(d, tile, type);
        distance = distance_of_share(d, top_p, total, weights);
    }
    int64_t count = collect(&d->row, distance, entries, type);
    entries = sort_entries(entries, spare, count);
    if (top_k)
        count = min_i64(count, top_k);
    for (int64_t i = 0; i < count; i += LANES) {
        float logits[LANES] = {0};
        for (int64_t lane = 0; lane < min_i64(LANES, count - i); lane++)
            logits[lane] = logit_of(entries[i + lane]);
        store_f32(weights + i, weights_of(d, load_f32(logits)));
    }
    if (top_k)
        total = sum_of(weights, count);
    int64_t kept = 0;
    while (kept < count && (kept == 0 || top_p >= 1 || kept_weight < top_p * total))
        kept_weight += weights[kept++];
    return id_of(entries[place_of(weights, kept, kept_weight, d->uniform).index]);
}

INLINE void sample_row(Sample *s, int64_t index, int type) {
    const int64_t tiles = tiles_of(s->size);
    const int64_t top_k = s->top_k[index] > 0 && s->top_k[index] < s->size ? s->top_k[index] : 0;
    const float top_p = s->top_p[index];
    const int sorted = top_k || top_p < 1;
    // Two lists of entries and their weights, or the tiles' weights; then the groups. What few entries do not fill
    // costs no memory: the system hands out pages when they are written.
    const int64_t list = sorted ? tiles * TILE : 0, numbers = sorted ? tiles * TILE : tiles;
    uint64_t *entries =
        malloc(2 * (size_t)list * sizeof *entries + (size_t)(numbers + tiles * LANES) * sizeof(float));
    if (!entries) {
        s->out_of_memory = 1;
        return;
    }
    float *weights = (float *)(entries + 2 * list), *groups = weights + numbers;
    Draw d = {{at(s->logits, index * s->stride, type), s->size, tiles, groups, 0},
              s->temperature[index], s->min_p[index], s->uniforms[index]};
    find_maxima(&d.row, type);
    if (sorted)
        s->ids[index] = draw_sorted(&d, top_k, top_p, entries, entries + list, weights, type);
    else
        s->ids[index] = draw_unsorted(&d, weights, type);
    free(entries);
}

static void sample_task(void *context, int64_t index) {
    Sample *s = context;
    if (s->type == BF16)
        sample_row(s, index, BF16);
    else
        sample_row(s, index, F32);
}

// logits [rows, size] with a distance of `stride` between rows, size in [1, 2^31); the others [rows]. Returns -1
// when there is no memory.
EXPORT int64_t octavo_sample(const void *logits, const float *temperature, const int64_t *top_k, const float *top_p,
                             const float *min_p, const double *uniforms, int64_t *ids, int64_t rows, int64_t stride,
                             int64_t size, int64_t type, int64_t threads) {
    Sample s = {logits, temperature, top_p, min_p, top_k, uniforms, ids, stride, size, type, 0};
    parallel_for(threads, rows, sample_task, &s);
    return s.out_of_memory ? -1 : 0;
}
