// Linear layers in float32 and bfloat16, and the packing of weights of all types.
#include "linear_best.h"

static void linear_task(void *context, int64_t index) {
    const Linear *l = context;
    if (l->out_type == BF16)
        linear_task_by_tiles(l, index, BF16);
    else
        linear_task_of(l, index, F32);
}

// x [rows, inputs], a multiple of 4 bytes a row; bias [outputs] or NULL; out [rows, outputs].
EXPORT void octavo_linear(const void *x, const void *packed, const void *bias, void *out, int64_t rows,
                          int64_t outputs, int64_t inputs, int64_t type, int64_t threads) {
    Linear l = {.x = x, .packed = packed, .bias = bias, .out = out, .rows = rows, .outputs = outputs,
                .inputs = inputs, .out_type = type};
    const int64_t tasks = divide(&l, threads);
    parallel_for(threads, tasks, linear_task, &l);
}

// The `count` largest outputs of each row: values, ids [rows, count]. Returns -1 when there is no memory.
EXPORT int64_t octavo_linear_best(const void *x, const void *packed, float *values, int64_t *ids, int64_t count,
                                  int64_t rows, int64_t outputs, int64_t inputs, int64_t type, int64_t threads) {
    const Linear l = {.x = x, .packed = packed, .rows = rows, .outputs = outputs, .inputs = inputs, .out_type = type};
    return best_of_linear(&l, (int)type, count, values, ids, threads);
}

// weight [outputs, inputs], a multiple of 4 bytes a row; packed holds as many, outputs rounded up to a panel.
EXPORT void octavo_pack_linear(const void *weight, void *packed, int64_t outputs, int64_t inputs, int64_t type) {
    const int64_t steps = inputs * size_of((int)type) / 4, panels = (outputs + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t i = 0; i < PANEL; i++) {
                char *to = (char *)packed + ((panel * steps + step) * PANEL + i) * 4;
                const int64_t row = panel * PANEL + i;
                if (row < outputs)
                    memcpy(to, (const char *)weight + (row * steps + step) * 4, 4);
                else
                    memset(to, 0, 4);
            }
}
