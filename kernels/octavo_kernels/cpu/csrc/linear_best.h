// The largest outputs of each row of a product, for a sampler that needs no others: some panels at a time are
// multiplied into a buffer and looked through, so that the whole result is never written.
#pragma once
#include <stdlib.h>

#include "linear_amx.h"

#define BEST_PANELS 16  // multiplied at once: with all rows of a tile, the buffer fits on a stack
#define PARTS_PER_THREAD 8

typedef struct {
    Linear l;
    int type;
    int64_t count;
    float *values;  // [rows, parts, count] in falling order, equals by their outputs
    int32_t *ids;
    float *floors;  // [rows] what so many outputs of some part reach: what is below is looked at no more
} Best;

static void insert(float *values, int32_t *ids, int64_t count, float value, int32_t id) {
    int64_t i = count - 1;
    for (; i > 0 && values[i - 1] < value; i--) {
        values[i] = values[i - 1];
        ids[i] = ids[i - 1];
    }
    values[i] = value;
    ids[i] = id;
}

static void forget_all(float *values, int32_t *ids, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = value;
        ids[i] = 0;
    }
}

// Looks through `size` more outputs of a row, the first of which is `first`. A NaN makes all values NaN. Threads may
// overwrite one another's floor: any of them is right.
INLINE void look_through(const void *row, int64_t size, int64_t first, float *values, int32_t *ids, int64_t count,
                         float *floor, int type) {
    float least;
    __atomic_load(floor, &least, __ATOMIC_RELAXED);
    if (values[0] != values[0])
        return;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = min_i64(LANES, size - i);
        const Vec v = left == LANES ? load(row, i, type) : load_part(row, i, left, type);
        // Not less (or equal), which a NaN is not either.
        uint32_t larger = lanes_of(~(v <= values[count - 1]) & ~(v < least));
        for (larger &= (1u << left) - 1; larger; larger &= larger - 1) {
            const int lane = __builtin_ctz(larger);
            if (v[lane] != v[lane]) {
                forget_all(values, ids, count, NAN);
                return;
            }
            if (v[lane] > values[count - 1])
                insert(values, ids, count, v[lane], (int32_t)(first + i + lane));
        }
    }
    if (values[count - 1] > least)
        __atomic_store(floor, &values[count - 1], __ATOMIC_RELAXED);
}

// The same product as `linear_task_of` and its like would do, of some rows and panels and into a buffer.
static void multiply_into(void *buffer, const Linear *l, Part part, int type) {
    const int64_t row_bytes = l->inputs * size_of(type), groups = (l->inputs + GROUP - 1) / GROUP;
    Linear some = *l;
    some.x = (const char *)l->x + part.begin * row_bytes;
    some.packed = (const char *)l->packed + part.first_panel * PANEL * row_bytes;
    some.out = buffer;
    some.rows = part.end - part.begin;
    some.outputs = min_i64(l->outputs, part.last_panel * PANEL) - part.first_panel * PANEL;
    some.panels_per_task = part.last_panel - part.first_panel;
    some.tasks_per_tile = some.threads = 1;
    if (type == INT8) {
        some.scales += part.first_panel * PANEL;
        some.x_scales += part.begin * groups;
        some.x_sums += part.begin * groups;
        linear_task_by_tiles(&some, 0, INT8);
    } else if (type == BF16) {
        linear_task_by_tiles(&some, 0, BF16);
    } else {
        linear_task_of(&some, 0, F32);
    }
}

static void best_task(void *context, int64_t index) {
    const Best *b = context;
    const Part whole = part_of(&b->l, index);
    _Alignas(64) char buffer[M_TILE * BEST_PANELS * PANEL * sizeof(float)];
    for (int64_t panel = whole.first_panel; panel < whole.last_panel; panel += BEST_PANELS) {
        const Part part = {whole.begin, whole.end, panel, min_i64(whole.last_panel, panel + BEST_PANELS)};
        const int64_t first = panel * PANEL, size = min_i64(b->l.outputs, part.last_panel * PANEL) - first;
        multiply_into(buffer, &b->l, part, b->type);
        for (int64_t row = part.begin; row < part.end; row++) {
            const int64_t to = (row * b->l.tasks_per_tile + index % b->l.tasks_per_tile) * b->count;
            const void *outputs = at(buffer, (row - part.begin) * size, (int)b->l.out_type);
            float *values = b->values + to;
            int32_t *ids = b->ids + to;
            if (panel == whole.first_panel)
                forget_all(values, ids, b->count, -INFINITY);
            if (b->l.out_type == BF16)
                look_through(outputs, size, first, values, ids, b->count, b->floors + row, BF16);
            else
                look_through(outputs, size, first, values, ids, b->count, b->floors + row, F32);
        }
    }
}

// Joins the parts of a row, in the place of the first.
static void join_row(const Best *b, int64_t row, float *values, int64_t *ids) {
    const int64_t parts = b->l.tasks_per_tile, count = b->count;
    float *best = b->values + row * parts * count;
    int32_t *best_ids = b->ids + row * parts * count;
    for (int64_t part = 1; part < parts && best[0] == best[0]; part++) {
        const int64_t end = (part + 1) * count;
        if (best[part * count] != best[part * count])
            forget_all(best, best_ids, count, NAN);
        for (int64_t i = part * count; i < end && best[i] > best[count - 1]; i++)
            insert(best, best_ids, count, best[i], best_ids[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        values[row * count + i] = best[i];
        ids[row * count + i] = best_ids[i];
    }
}

// values, ids [rows, count], in falling order; fewer outputs above minus infinity than `count` leave values of minus
// infinity at the end. Returns -1 when there is no memory.
static int64_t best_of_linear(const Linear *l, int type, int64_t count, float *values, int64_t *ids,
                              int64_t threads) {
    Best b = {.l = *l, .type = type, .count = count};
    b.l.threads = threads;
    const int64_t panels = (l->outputs + PANEL - 1) / PANEL, parts = PARTS_PER_THREAD * threads;
    b.l.panels_per_task = max_i64(BEST_PANELS, (panels + parts - 1) / parts);
    b.l.tasks_per_tile = (panels + b.l.panels_per_task - 1) / b.l.panels_per_task;
    const int64_t candidates = l->rows * b.l.tasks_per_tile * count;
    b.values = malloc((size_t)candidates * (sizeof *b.values + sizeof *b.ids) + (size_t)l->rows * sizeof *b.floors);
    if (!b.values)
        return -1;
    b.ids = (int32_t *)(b.values + candidates);
    b.floors = (float *)(b.ids + candidates);
    for (int64_t row = 0; row < l->rows; row++)
        b.floors[row] = -INFINITY;
    parallel_for(threads, (l->rows + M_TILE - 1) / M_TILE * b.l.tasks_per_tile, best_task, &b);
    for (int64_t row = 0; row < l->rows; row++)
        join_row(&b, row, values, ids);
    free(b.values);
    return 0;
}
