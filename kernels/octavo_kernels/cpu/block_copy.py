"""`ops.copy_blocks`, `ops.save_blocks` and `ops.restore_blocks` on a CPU, by NumPy; see `ops` for shapes.

torch would hand each block to all threads, and wait for them ten times as long as the copy takes when
something else has a core.
"""

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(cache: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    array = cache.numpy()
    array[:, destinations] = array[:, sources]  # the right side is a copy


def save_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    source, target = cache.numpy(), rows.numpy()
    for block, index in zip(blocks, indices, strict=True):
        target[index] = source[:, block]


def restore_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    target, source = cache.numpy(), rows.numpy()
    for block, index in zip(blocks, indices, strict=True):
        target[:, block] = source[index]
