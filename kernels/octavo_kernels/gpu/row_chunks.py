"""Rows of logits in chunks, and what is known of each chunk: its maximum, its weight, and whether what top-k
or top-p keep may lie in it. `selection` says what for.

Maxima and weights are found by programs of 16 chunks each, so that one row alone uses the whole chip, and the
bytes of many rows are what bounds them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.gpu.compiled import Form
from octavo_kernels.gpu.selection import (
    CHUNK,
    GROUP,
    LEAST_KEY,
    MOST_LOGITS,
    NO_KEY,
    bound_of,
    key_of,
    lowest_weighty,
    number_of,
    weight_of,
)

TILE = CHUNK * GROUP  # logits of a program that reads a row once
READ_WARPS = 4  # 32 logits for each thread: four loads of 16 bytes under way at once
# A division by less, or by more, is not what it should be on a GPU.
_LEAST_TEMPERATURE = tl.constexpr(1e-30)
_MOST_TEMPERATURE = tl.constexpr(1e30)


@triton.jit
def temperature_of(p_temperature, row):
    return tl.minimum(tl.maximum(tl.load(p_temperature + row), _LEAST_TEMPERATURE), _MOST_TEMPERATURE)


@triton.jit
def share_of(share, total):
    """The least weight that is a share of `total` or more, 1 at least."""
    exact = share.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(tl.minimum(whole, total), 1)


@triton.jit
def _maxima_kernel(
    p_logits, p_keys, row_stride, size, chunks, tiles, CHUNK: tl.constexpr, GROUP: tl.constexpr
):
    """The highest key of each chunk [R, chunks]."""
    row, tile = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles
    i_chunk = tile * GROUP + tl.arange(0, GROUP)
    i_token = i_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = i_token < size
    x = tl.load(p_logits + row * row_stride + i_token, mask=is_token, other=0.0).to(tl.float32)
    keys = tl.max(tl.where(is_token, key_of(x), NO_KEY), 1)
    tl.store(p_keys + row * chunks + i_chunk, keys, mask=i_chunk < chunks)


@triton.jit(do_not_specialize_on_alignment=["p_chosen"])  # which may begin anywhere in a prompt's tokens
def _weights_kernel(
    p_logits,
    p_keys,
    p_temperature,
    p_min_p,
    p_chosen,
    p_weights,
    p_above,
    row_stride,
    size,
    chunks,
    tiles,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The weight of each chunk [R, chunks]; and with `p_chosen` [R], how many of each tile's logits are above
    that of the token it names [R, tiles]."""
    row, tile = tl.program_id(0).to(tl.int64) // tiles, tl.program_id(0) % tiles
    o_chunk = tl.arange(0, BLOCK_CHUNKS)
    largest = number_of(tl.max(tl.load(p_keys + row * chunks + o_chunk, o_chunk < chunks, NO_KEY), 0))
    temperature = 1.0 if p_temperature is None else temperature_of(p_temperature, row)
    min_p = 0.0 if p_min_p is None else tl.load(p_min_p + row)
    i_chunk = tile * GROUP + tl.arange(0, GROUP)
    i_token = i_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = i_token < size
    p_row = p_logits + row * row_stride
    x = tl.load(p_row + i_token, mask=is_token, other=0.0).to(tl.float32)
    weights = tl.where(is_token, weight_of(x, largest, temperature, min_p), 0)
    tl.store(p_weights + row * chunks + i_chunk, tl.sum(weights, 1), mask=i_chunk < chunks)
    if p_chosen is not None:
        chosen = key_of(tl.load(p_row + tl.load(p_chosen + row)).to(tl.float32))
        is_above = is_token & (key_of(x) > chosen)
        tl.store(p_above + row * tiles + tile, tl.sum(tl.sum(is_above.to(tl.int32), 1), 0))


@triton.jit(do_not_specialize=["count"])  # it differs from step to step
def _live_kernel(
    p_keys,
    p_weights,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_live,
    p_num_live,
    p_bound,
    count,
    size,
    chunks,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The chunks [R, chunks] that may hold what top-k or top-p keep, how many [R], and a key that none of
    what they keep is below [R]. Without `p_top_k`, top-k is `count` for all rows, and there is no top-p."""
    row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = i_chunk < chunks
    keys = tl.load(p_keys + row * chunks + i_chunk, mask=is_chunk, other=NO_KEY)
    largest_key = tl.max(keys, 0)
    top_k = count if p_top_k is None else tl.load(p_top_k + row)
    bound = tl.full([], LEAST_KEY, tl.int32)
    if (top_k > 0) & (top_k < size):
        lowest = tl.min(tl.where(is_chunk, keys, largest_key), 0)
        if top_k <= chunks:
            bound = bound_of(keys, is_chunk.to(tl.int32), top_k, lowest, largest_key)
    elif p_top_k is not None:
        largest, temperature = number_of(largest_key), temperature_of(p_temperature, row)
        weights = tl.load(p_weights + row * chunks + i_chunk, mask=is_chunk, other=0)
        target = share_of(tl.load(p_top_p + row), tl.sum(weights, 0))
        maxima = weight_of(number_of(keys), largest, temperature, tl.load(p_min_p + row))
        maxima = tl.where(is_chunk, maxima, 0)
        bound = bound_of(keys, maxima, target, lowest_weighty(largest, temperature), largest_key)
    is_live = is_chunk & (keys >= bound)
    place = tl.cumsum(is_live.to(tl.int32), 0) - 1
    tl.store(p_live + row * chunks + place, i_chunk, mask=is_live)
    tl.store(p_num_live + row, tl.sum(is_live.to(tl.int32), 0))
    tl.store(p_bound + row, bound)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits [R, V], each row contiguous, and the highest key of each of their chunks."""

    logits: Tensor
    keys: Tensor  # [R, chunks] int32

    @property
    def size(self) -> int:
        return self.logits.shape[1]

    @property
    def chunks(self) -> int:
        return self.keys.shape[1]

    @property
    def tiles(self) -> int:
        return -(-self.size // TILE)

    @property
    def block_chunks(self) -> int:
        return 1 << (self.chunks - 1).bit_length()

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(len(self.logits), *shape, dtype=dtype, device=self.logits.device)


def rows_of(logits: Tensor) -> Rows:
    logits = in_rows(logits)
    rows, size = logits.shape
    assert 0 < size <= MOST_LOGITS, f"{size} logits in a row; {MOST_LOGITS} are the most"
    chunks, tiles = triton.cdiv(size, CHUNK), triton.cdiv(size, TILE)
    keys = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _maxima_kernel[(rows * tiles,)](
        logits, keys, logits.stride(0), size, chunks, tiles, CHUNK=CHUNK, GROUP=GROUP, num_warps=READ_WARPS
    )
    return Rows(logits, keys)


def in_rows(logits: Tensor) -> Tensor:
    """The rows need not follow one another, and may be one and the same."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def weights_of(
    rows: Rows, temperature: Tensor | None, min_p: Tensor | None, chosen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What `_weights_kernel` says."""
    weights = rows.new(rows.chunks, dtype=torch.int64)
    above = None if chosen is None else rows.new(rows.tiles, dtype=torch.int32)
    _weights_kernel[(len(rows.logits) * rows.tiles,)](
        rows.logits,
        rows.keys,
        temperature,
        min_p,
        chosen,
        weights,
        above,
        rows.logits.stride(0),
        rows.size,
        rows.chunks,
        rows.tiles,
        CHUNK=CHUNK,
        GROUP=GROUP,
        BLOCK_CHUNKS=rows.block_chunks,
        num_warps=READ_WARPS,
    )
    return weights, above


def live_of(
    rows: Rows,
    count: int,
    weights: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_live_kernel` says."""
    live = rows.new(rows.chunks, dtype=torch.int32)
    num_live, bound = (rows.new(dtype=torch.int32) for _ in range(2))
    _live_kernel[(len(rows.logits),)](
        rows.keys,
        weights,
        temperature,
        top_k,
        top_p,
        min_p,
        live,
        num_live,
        bound,
        count,
        rows.size,
        rows.chunks,
        BLOCK_CHUNKS=rows.block_chunks,
        num_warps=READ_WARPS,
    )
    return live, num_live, bound


def forms(capability: int) -> list[Form]:
    """For a vocabulary of 128256."""
    types = {
        "p_logits": "*bf16:16",
        **dict.fromkeys(("p_keys", "p_live", "p_num_live", "p_bound", "p_above"), "*i32:16"),
        **dict.fromkeys(("p_weights", "p_top_k", "p_chosen"), "*i64:16"),
        **dict.fromkeys(("p_temperature", "p_top_p", "p_min_p"), "*fp32:16"),
        **dict.fromkeys(("row_stride", "size", "tiles"), "i32:16"),
        **dict.fromkeys(("chunks", "count"), "i32"),
    }
    groups, block = {"CHUNK": CHUNK, "GROUP": GROUP}, {"BLOCK_CHUNKS": 512}
    no_settings = {"p_temperature": None, "p_min_p": None}
    no_weights = {**no_settings, "p_weights": None, "p_top_k": None, "p_top_p": None}
    not_chosen = {"p_chosen": None, "p_above": None}
    return [
        Form(name, kernel, types, constants, READ_WARPS, stages=1, hot=kernel is not _live_kernel)
        for name, kernel, constants in (
            ("chunks' maxima", _maxima_kernel, groups),
            ("chunks' weights, sample", _weights_kernel, groups | block | not_chosen),
            ("chunks' weights, token_logprobs", _weights_kernel, groups | block | no_settings),
            ("live chunks, sample", _live_kernel, block),
            ("live chunks, best_logits", _live_kernel, block | no_weights),
        )
    ]
