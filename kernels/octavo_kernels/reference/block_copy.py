"""Reference of `ops.copy_blocks`, `ops.save_blocks` and `ops.restore_blocks`; see there for shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(cache: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    index = torch.tensor((sources, destinations), device=cache.device)
    cache.index_copy_(1, index[1], cache.index_select(1, index[0]))


def save_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    for block, index in zip(blocks, indices, strict=True):
        rows[index].copy_(cache[:, block], non_blocking=rows.is_pinned())


def restore_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    for block, index in zip(blocks, indices, strict=True):
        cache[:, block].copy_(rows[index], non_blocking=rows.is_pinned())
