"""Tile shapes of the attention kernels, by chip, and what else they need to know of one.

A chip is named by its compute capability, major x 10 + minor. Three sorts are told apart: 90 (Hopper, matrix
products of 64 rows by a group of four warps, out of shared memory), 100 (Blackwell for data centres, whose
products leave their sums in a memory of their own), and all others, which multiply as 80 does (Ampere, Ada,
Blackwell for desks). What stands for the last fits into the 99 KiB that 86, 89 and 120 have.

The numbers were chosen by what the compiler makes of them (`compiled.py` shows it): no register spilled, and
as many bytes on their way to a core as memory's latency asks for, about 30 KB on an H200. No autotuning runs
on a user's machine.
"""

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

# Shared memory that one program may have, and all of a core's, of which each program takes some more.
SHARED_BYTES = MappingProxyType({80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024})
CORE_SHARED_BYTES = MappingProxyType({80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024})
SHARED_RESERVED_BYTES = 1024
CORE_REGISTERS = 65536
CORE_THREADS = 2048
CORE_PROGRAMS = 32

_INTERPRETED_CORES = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of one program at a time: `rows` of queries by `keys`. A row is a query head of a token."""

    rows: int
    keys: int
    warps: int
    # Of the pipeline that fetches keys, where they are not quantised: while a tile is computed, two less than
    # this are on their way, and another once its products are begun.
    stages: int


# By bytes of a cache's numbers, then by head size. Decoding waits for memory, so what counts is bytes under
# way: of bfloat16, one to two tiles of 32 KB (K and V) of each of three programs, as many as shared memory
# holds on 90. A quantised tile waits in registers for its turn, and the numbers made of it take more: at 256
# a head they need eight warps. 16 rows are the fewest that a matrix product takes, which makes 16 operations
# for a byte of bfloat16, where an H200 has about 200.
_DECODE = {
    1: {64: Tile(16, 64, 4, 1), 128: Tile(16, 64, 4, 1), 256: Tile(16, 32, 8, 1)},
    2: {64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)},
    4: {64: Tile(16, 64, 4, 3), 128: Tile(16, 32, 4, 3), 256: Tile(16, 16, 4, 3)},
}

# Then by sort of chip. 128 rows are what makes a tile of K and V worth its way from the second-level cache:
# at the full rate of an H200's products, 64 rows would ask it for 15 TB/s. On 90 a product of 64 rows by 64
# keys reads shared memory for as long as it computes, one by 128 keys for less; but at 64 a head the
# exponentials take as long as the products, and two programs of 128 registers on a core hide one's behind the
# other's. Elsewhere, at larger heads and of quantised caches, registers limit the keys.
_PREFILL = {
    1: {
        80: {64: Tile(128, 32, 8, 1), 128: Tile(128, 32, 8, 1), 256: Tile(64, 32, 8, 1)},
        90: {64: Tile(128, 64, 8, 1), 128: Tile(128, 32, 8, 1), 256: Tile(64, 16, 8, 1)},
        100: {64: Tile(128, 32, 8, 1), 128: Tile(128, 32, 8, 1), 256: Tile(64, 32, 8, 1)},
    },
    2: {
        80: {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 16, 8, 4)},
        90: {64: Tile(128, 64, 8, 4), 128: Tile(128, 128, 8, 3), 256: Tile(128, 32, 8, 4)},
        100: {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3)},
    },
    # Three products each, of which 100's memory of sums has no room for more rows.
    4: {
        sort: {64: Tile(32, 32, 4, 3), 128: Tile(32, 16, 4, 3), 256: Tile(16, 16, 4, 3)}
        for sort in (80, 90, 100)
    },
}


def decode_tile(head_size: int, number_bytes: int) -> Tile:
    """`head_size`: a power of two; `number_bytes`: 1 of a quantised cache."""
    return _DECODE[number_bytes][max(head_size, 64)]


def prefill_tile(capability: int, head_size: int, number_bytes: int) -> Tile:
    """As `decode_tile`."""
    sort = 10 * (capability // 10) if 90 <= capability < 110 else 80
    return _PREFILL[number_bytes][sort][max(head_size, 64)]


@cache
def capability(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter's
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_cores(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
