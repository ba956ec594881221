"""`ops.copy_blocks`, `ops.save_blocks` and `ops.restore_blocks` in the Triton language; see `ops` for shapes.

One launch moves all blocks of all planes: a program has a part of one block of one plane. What lies on the
host goes through memory on the device where a block is in one piece, so that the bus sees one long transfer a
block instead of one for each plane.

Copies within the cache whose sources are no destinations take one launch, since no order among its programs
is needed. Others take two: all sources are gathered, then scattered, and the second launch begins when the
first has ended.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.gpu.compiled import Form

_BLOCK = 1024  # words of a program: with four warps, two 16-byte loads that a thread has under way at once
_WARPS = 4
_STAGED_BYTES = 32 * 2**20  # on the device, on the way to or from the host; a block at least


@triton.jit(do_not_specialize_on_alignment=["p_from_index", "p_to_index"])  # the second begins anywhere
def _move_kernel(
    p_from,
    p_to,
    p_from_index,
    p_to_index,
    from_plane_stride,
    from_stride,
    to_plane_stride,
    to_stride,
    size,
    BLOCK: tl.constexpr,
):
    """Strides and `size` in words. Index pointers that are None stand for 0, 1, 2, ..."""
    i_block = tl.program_id(0).to(tl.int64)
    i_plane = tl.program_id(1).to(tl.int64)
    o_word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < size
    i_from = i_block if p_from_index is None else tl.load(p_from_index + i_block)
    i_to = i_block if p_to_index is None else tl.load(p_to_index + i_block)
    p_from += i_plane * from_plane_stride + i_from * from_stride
    p_to += i_plane * to_plane_stride + i_to * to_stride
    tl.store(p_to + o_word, tl.load(p_from + o_word, mask=mask), mask=mask)


def copy_blocks(cache: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    from_index, to_index = _sent(cache.device, sources, destinations)
    if set(sources).isdisjoint(destinations):
        _move(cache, from_index, cache, to_index, len(sources))
        return
    staging = cache.new_empty(cache.shape[0], len(sources), cache.shape[2])
    _move(cache, from_index, staging, None, len(sources))
    _move(staging, None, cache, to_index, len(sources))


def save_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    if rows.device == cache.device:
        from_index, to_index = _sent(cache.device, blocks, indices)
        _move(cache, from_index, rows.transpose(0, 1), to_index, len(blocks))
    else:
        save_to_host(cache, blocks, rows, indices)


def restore_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    if rows.device == cache.device:
        from_index, to_index = _sent(cache.device, indices, blocks)
        _move(rows.transpose(0, 1), from_index, cache, to_index, len(blocks))
    else:
        restore_from_host(cache, blocks, rows, indices)


def save_to_host(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    pinned = rows.is_pinned()
    for part, staging in _staged(cache, len(blocks)):
        (from_index,) = _sent(cache.device, blocks[part])
        _move(cache, from_index, staging.transpose(0, 1), None, len(staging))
        for content, index in zip(staging, indices[part], strict=True):
            rows[index].copy_(content, non_blocking=pinned)


def restore_from_host(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    pinned = rows.is_pinned()
    for part, staging in _staged(cache, len(blocks)):
        for content, index in zip(staging, indices[part], strict=True):
            content.copy_(rows[index], non_blocking=pinned)
        (to_index,) = _sent(cache.device, blocks[part])
        _move(staging.transpose(0, 1), None, cache, to_index, len(staging))


def _staged(cache: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of `count` blocks, and memory [n, P, E] for the n of each. It is the same for all parts: a stream
    does one thing after the other."""
    num_planes, _, num_bytes = cache.shape
    at_once = min(max(_STAGED_BYTES // (num_planes * num_bytes), 1), count)
    staging = cache.new_empty(at_once, num_planes, num_bytes)
    for begin in range(0, count, at_once):
        end = min(begin + at_once, count)
        yield slice(begin, end), staging[: end - begin]


def _sent(device: torch.device, *columns: Sequence[int]) -> Tensor:
    """On the device, without waiting for it."""
    return torch.tensor(columns, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _move(
    source: Tensor, from_index: Tensor | None, target: Tensor, to_index: Tensor | None, count: int
) -> None:
    """Of every plane of `source` [P, N, E] the blocks `from_index` [count] to those `to_index` of
    `target`."""
    num_planes, _, num_bytes = source.shape
    word = torch.int32 if num_bytes % 4 == 0 else torch.uint8
    source, target = source.view(word), target.view(word)
    size = source.shape[2]
    _move_kernel[count, num_planes, triton.cdiv(size, _BLOCK)](
        source,
        target,
        from_index,
        to_index,
        *source.stride()[:2],
        *target.stride()[:2],
        size,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def forms(capability: int) -> list[Form]:
    index = {"p_from_index": "*i64", "p_to_index": "*i64"}
    strides = dict.fromkeys(("from_plane_stride", "from_stride", "to_plane_stride", "to_stride"), "i64:16")
    types = {"p_from": "*i32:16", "p_to": "*i32:16", **index, **strides, "size": "i32:16"}
    return [
        Form(name, _move_kernel, types, {"BLOCK": _BLOCK, **constants}, _WARPS, stages=1)
        for name, constants in (
            ("copy_blocks", {}),
            ("save_blocks", {"p_to_index": None}),
            ("restore_blocks", {"p_from_index": None}),
        )
    ]
