// Intel's AMX: eight tiles of up to 16 rows of up to 64 bytes, and products of them. What the kernels need of it,
// by the CPU or, with OCTAVO_EMULATE_AMX, in plain C, so that tests prove the kernels on a machine without it.
//
// The number of a tile must be a literal, by macros if need be. The fences are there because GCC's intrinsics do
// not say that they read memory: what was just written to a buffer might not be there yet, or never.
#pragma once
#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) || defined(OCTAVO_EMULATE_AMX)
#define HAVE_AMX

#define TILES 8
#define TILE_ROWS 16
#define TILE_BYTES 64  // of a row

// The shapes of all tiles, as ldtilecfg reads them.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

_Static_assert(sizeof(TileShapes) == 64, "ldtilecfg reads 64 bytes");

#ifdef OCTAVO_EMULATE_AMX
#include "amx_emulated.h"
#else

INLINE void tile_fence(void) { __asm__ volatile("" ::: "memory"); }

// Zeroes all tiles. To be done by each thread; those it leaves are released, so that switches to other threads
// need not save them.
INLINE void tile_configure(const TileShapes *shapes) {
    tile_fence();
    _tile_loadconfig(shapes);
}

INLINE void tile_release(void) { _tile_release(); }

#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride_bytes)       \
    do {                                          \
        tile_fence();                             \
        _tile_loadd(tile, from, stride_bytes);    \
    } while (0)
#define tile_store(tile, to, stride_bytes) _tile_stored(tile, to, stride_bytes)
// sums [m][n] += the sums over k of x [m][k] w [k][n]; an element of x and w is a pair of bfloat16, in float32 ...
#define tile_dot_bf16(sums, x, w) _tile_dpbf16ps(sums, x, w)
// ... or four bytes, signed in x and unsigned in w, in int32.
#define tile_dot_int8(sums, x, w) _tile_dpbsud(sums, x, w)

#endif
#endif
