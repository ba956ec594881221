"""`ops.best_token`, `ops.sample`, `ops.token_logprobs` and `ops.best_logits` in the Triton language; see
`ops` for shapes, and `selection` for how thresholds are found.

What reads whole rows once is divided among programs of 4096 logits each: the best token, and what
`row_chunks` finds of chunks. What then looks for thresholds has one program a row: it reads a row's live
chunks, from the level-2 cache, many times.

A draw inverts the cumulative distribution as the reference does: in the order of ids where nothing is cut off
by order, else from the best on down, equals in the order of their ids. All sums are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.gpu.compiled import Form
from octavo_kernels.gpu.row_chunks import (
    READ_WARPS,
    TILE,
    Rows,
    in_rows,
    live_of,
    rows_of,
    share_of,
    temperature_of,
    weights_of,
)
from octavo_kernels.gpu.selection import (
    CHUNK,
    GROUP,
    NO_KEY,
    key_of,
    load_group,
    lowest_weighty,
    nth_of_key,
    number_of,
    select,
    weight_of,
)

_SELECT_WARPS = 16  # 8 logits for each thread, beside four sums of each: as many registers as there are
_UNIT_LOG = tl.constexpr(27.725887222397812)  # of 2^40


@triton.jit
def _best_of_tile_kernel(p_logits, p_best, row_stride, size, tiles, TILE: tl.constexpr):
    """A key above, and below it what is the higher the lower the id."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i_token = tile * TILE + tl.arange(0, TILE)
    is_token = i_token < size
    x = tl.load(p_logits + row.to(tl.int64) * row_stride + i_token, mask=is_token, other=0.0)
    key = tl.where(is_token, key_of(x.to(tl.float32)), NO_KEY)
    best = tl.max((key.to(tl.int64) << 32) | (0x7FFFFFFF - i_token).to(tl.int64), 0)
    tl.store(p_best + row.to(tl.int64) * tiles + tile, best)


@triton.jit
def _best_of_row_kernel(p_best, p_ids, p_logits, tiles, BLOCK_TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i_tile = tl.arange(0, BLOCK_TILES)
    best = tl.load(p_best + row * tiles + i_tile, mask=i_tile < tiles, other=-(2**63))
    best = tl.max(best, 0)
    tl.store(p_ids + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    tl.store(p_logits + row, number_of(best >> 32))


@triton.jit
def _point_in(uniform, total):
    """A weight in [0, total); -1 where nothing weighs anything."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_kernel(
    p_logits,
    p_keys,
    p_weights,
    p_live,
    p_num_live,
    p_bound,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_uniforms,
    p_ids,
    row_stride,
    size,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    i_chunk = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = i_chunk < chunks
    largest_key = tl.max(tl.load(p_keys + row * chunks + i_chunk, mask=is_chunk, other=NO_KEY), 0)
    largest = number_of(largest_key)
    weights = tl.load(p_weights + row * chunks + i_chunk, mask=is_chunk, other=0)
    temperature, min_p = temperature_of(p_temperature, row), tl.load(p_min_p + row)
    top_k, top_p, uniform = tl.load(p_top_k + row), tl.load(p_top_p + row), tl.load(p_uniforms + row)
    total = tl.sum(weights, 0)
    is_limited = (top_k > 0) & (top_k < size)
    if is_limited | (top_p < 1):
        p_live += row * chunks
        num_live = tl.load(p_num_live + row)
        key = largest_key.to(tl.int64)
        nth = tl.zeros([], tl.int64)
        if top_k != 1:
            key = tl.load(p_bound + row).to(tl.int64)
            # Where top-k cuts, where top-p does, and where the point lies. One piece of code for all three:
            # with three, the registers do not suffice.
            for stage in range(3):
                if (stage == 2) | ((stage == 0) & is_limited) | ((stage == 1) & (top_p < 1)):
                    target = tl.where(stage == 0, top_k, share_of(top_p, total))
                    target = tl.where(stage == 2, _point_in(uniform, total) + 1, target)
                    key, count_above, weight_above = select(
                        p_row, p_live, num_live, size, target, stage == 0, key, largest_key, temperature,
                        min_p, CHUNK, GROUP, True,
                    )  # fmt: skip
                    weight = weight_of(number_of(key), largest, temperature, min_p)
                    equals = tl.where(stage == 0, top_k - count_above, 0)
                    if stage > 0:
                        equals = tl.cdiv(target - weight_above, tl.maximum(weight, 1))
                    total = weight_above + equals * weight
                    nth = equals - 1
                if stage == 0:
                    key = tl.maximum(key, lowest_weighty(largest, temperature).to(tl.int64))
        token = nth_of_key(p_row, p_live, num_live, size, key.to(tl.int32), nth, CHUNK, GROUP)
    else:
        point = _point_in(uniform, total)
        ends = tl.cumsum(weights, 0)
        chunk = tl.sum((is_chunk & (ends <= point)).to(tl.int32), 0)
        before = tl.max(tl.where(ends <= point, ends, 0), 0)
        i_token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(p_row + i_token, mask=i_token < size, other=0.0).to(tl.float32)
        inside = tl.where(i_token < size, weight_of(x, largest, temperature, min_p), 0)
        token = chunk * CHUNK + tl.sum((before + tl.cumsum(inside, 0) <= point).to(tl.int32), 0)
    tl.store(p_ids + row, tl.minimum(token, size - 1).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["p_chosen"])
def _logprobs_kernel(
    p_logits,
    p_keys,
    p_weights,
    p_above,
    p_chosen,
    p_logprobs,
    p_ranks,
    p_largest,
    p_log_total,
    row_stride,
    chunks,
    tiles,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK_CHUNKS)
    largest = number_of(tl.max(tl.load(p_keys + row * chunks + o, mask=o < chunks, other=NO_KEY), 0))
    total = tl.sum(tl.load(p_weights + row * chunks + o, mask=o < chunks, other=0), 0)
    log_total = tl.log(total.to(tl.float32)) - _UNIT_LOG
    x = tl.load(p_logits + row * row_stride + tl.load(p_chosen + row)).to(tl.float32)
    tl.store(p_logprobs + row, (x - largest) - log_total)
    rank = tl.sum(tl.load(p_above + row * tiles + o, mask=o < tiles, other=0), 0) + 1
    tl.store(p_ranks + row, rank.to(tl.int64))
    tl.store(p_largest + row, largest)
    tl.store(p_log_total + row, log_total)


@triton.jit(do_not_specialize=["count"])
def _best_kernel(
    p_logits,
    p_keys,
    p_live,
    p_num_live,
    p_bound,
    p_ids,
    p_best,
    count,
    row_stride,
    size,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The `count` best of each row [R, count], in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    o = tl.arange(0, BLOCK_CHUNKS)
    largest_key = tl.max(tl.load(p_keys + row * chunks + o, mask=o < chunks, other=NO_KEY), 0)
    p_live += row * chunks
    num_live = tl.load(p_num_live + row)
    low = tl.load(p_bound + row)
    key, count_above, _ = select(
        p_row, p_live, num_live, size, count, True, low, largest_key, 1.0, 0.0, CHUNK, GROUP, False
    )
    key = key.to(tl.int32)
    equals_left = count - count_above.to(tl.int32)
    written = tl.zeros([], tl.int32)
    for first in range(0, num_live, GROUP):
        i_token, x, keys = load_group(p_row, p_live, first, num_live, size, CHUNK, GROUP)
        i_token, x = tl.reshape(i_token, [GROUP * CHUNK]), tl.reshape(x, [GROUP * CHUNK])
        keys = tl.reshape(keys, [GROUP * CHUNK])
        is_equal = (keys == key).to(tl.int32)
        is_best = (keys > key) | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= equals_left))
        place = written + tl.cumsum(is_best.to(tl.int32), 0) - 1
        tl.store(p_ids + row * count + place, i_token.to(tl.int64), mask=is_best)
        tl.store(p_best + row * count + place, x, mask=is_best)
        equals_left -= tl.sum(is_equal, 0)
        written += tl.sum(is_best.to(tl.int32), 0)


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = in_rows(logits)
    rows, size = logits.shape
    tiles = triton.cdiv(size, TILE)
    parts = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _best_of_tile_kernel[(rows * tiles,)](
            logits, parts, logits.stride(0), size, tiles, TILE=TILE, num_warps=READ_WARPS
        )
        _best_of_row_kernel[(rows,)](
            parts, token_ids, best, tiles, BLOCK_TILES=triton.next_power_of_2(tiles), num_warps=1
        )
    return token_ids, best


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(logits):
        return token_ids
    rows = rows_of(logits)
    weights, _ = weights_of(rows, temperature, min_p, None)
    live = live_of(rows, 0, weights, temperature, top_k, top_p, min_p)
    _draw_kernel[(len(logits),)](
        rows.logits,
        rows.keys,
        weights,
        *live,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        token_ids,
        rows.logits.stride(0),
        rows.size,
        rows.chunks,
        CHUNK=CHUNK,
        GROUP=GROUP,
        BLOCK_CHUNKS=rows.block_chunks,
        num_warps=_SELECT_WARPS,
    )
    return token_ids


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if not len(logits):
        return logits.new_empty(0, count, dtype=torch.int64), logits.new_empty(0, count, dtype=torch.float32)
    ids, values = _best(rows_of(logits), count)
    return ids, values.masked_fill(values[:, :1].isnan(), torch.nan)


def _best(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """The kernel writes them in the order of their ids, which a stable sort of those few leaves to equals."""
    ids, values = rows.new(count, dtype=torch.int64), rows.new(count, dtype=torch.float32)
    _best_kernel[(len(rows.logits),)](
        rows.logits,
        rows.keys,
        *live_of(rows, count),
        ids,
        values,
        count,
        rows.logits.stride(0),
        rows.size,
        rows.chunks,
        CHUNK=CHUNK,
        GROUP=GROUP,
        BLOCK_CHUNKS=rows.block_chunks,
        num_warps=_SELECT_WARPS,
    )
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_best: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, device = len(logits), logits.device
    logprobs, largest, log_total = (torch.empty(count, device=device) for _ in range(3))
    ranks = torch.empty(count, dtype=torch.int64, device=device)
    best_ids = torch.empty(count, num_best, dtype=torch.int64, device=device)
    if not count:
        return logprobs, ranks, best_ids, torch.empty(0, num_best, device=device), best_ids
    rows = rows_of(logits)
    weights, above = weights_of(rows, None, None, token_ids)
    _logprobs_kernel[(count,)](
        rows.logits,
        rows.keys,
        weights,
        above,
        token_ids,
        logprobs,
        ranks,
        largest,
        log_total,
        rows.logits.stride(0),
        rows.chunks,
        rows.tiles,
        BLOCK_CHUNKS=rows.block_chunks,
        num_warps=READ_WARPS,
    )
    if not num_best:
        return logprobs, ranks, best_ids, torch.empty(count, 0, device=device), best_ids
    best_ids, values = _best(rows, num_best)
    best_logprobs = (values - largest[:, None]) - log_total[:, None]
    place = torch.arange(1, num_best + 1, device=device)
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[:, 1:] = values[:, 1:] != values[:, :-1]
    best_ranks = torch.where(is_first, place, 0).cummax(dim=1).values  # equals share a rank
    return logprobs, ranks, best_ids, best_logprobs, best_ranks


def forms(capability: int) -> list[Form]:
    """For a vocabulary of 128256."""
    types = {
        **dict.fromkeys(("p_keys", "p_live", "p_num_live", "p_bound", "p_above"), "*i32:16"),
        **dict.fromkeys(("p_weights", "p_top_k", "p_chosen", "p_ids", "p_ranks"), "*i64:16"),
        **dict.fromkeys(("p_temperature", "p_top_p", "p_min_p", "p_logprobs"), "*fp32:16"),
        **dict.fromkeys(("p_largest", "p_log_total"), "*fp32:16"),
        "p_uniforms": "*fp64:16",
        **dict.fromkeys(("row_stride", "size", "tiles"), "i32:16"),
        **dict.fromkeys(("chunks", "count"), "i32"),
    }
    block = {"BLOCK_CHUNKS": 512}
    groups = {"CHUNK": CHUNK, "GROUP": GROUP, **block}
    return [
        Form(
            name,
            kernel,
            {**types, "p_logits": logits, "p_best": best},
            constants,
            warps,
            stages=1,
            hot=kernel is not _best_of_row_kernel,
        )
        for name, kernel, constants, warps, logits, best in (
            ("best_token, tiles", _best_of_tile_kernel, {"TILE": TILE}, READ_WARPS, "*bf16:16", "*i64:16"),
            ("best_token, rows", _best_of_row_kernel, {"BLOCK_TILES": 32}, 1, "*fp32:16", "*i64:16"),
            ("sample bfloat16", _draw_kernel, groups, _SELECT_WARPS, "*bf16:16", ""),
            ("sample float32", _draw_kernel, groups, _SELECT_WARPS, "*fp32:16", ""),
            ("token_logprobs", _logprobs_kernel, block, READ_WARPS, "*bf16:16", ""),
            ("best_logits", _best_kernel, groups, _SELECT_WARPS, "*bf16:16", "*fp32:16"),
        )
    ]
