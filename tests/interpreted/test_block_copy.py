"""Copies of whole blocks of all planes: spelled out block by block, at odd sizes and with chains."""

import pytest
import torch
from torch import Tensor

from octavo_kernels import ops
from octavo_kernels.gpu import block_copy as gpu_block_copy

SHAPES = pytest.mark.parametrize(
    "shape", [(2, 9, 1), (6, 9, 33), (3, 12, 4 * 1025), (1, 9, 8 * 130)], ids=str
)  # P, N, E
COPIES = [
    [(4, 2)],
    [(0, 1), (1, 2), (2, 8), (5, 0)],  # a chain
    [(3, 4), (4, 3)],
    [(7, 7), (0, 6)],
    [(1, 2), (1, 3), (1, 4)],
]


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


@SHAPES
@pytest.mark.parametrize("copies", COPIES, ids=str)
def test_sources_are_read_before_destinations_are_written(
    copies: list[tuple[int, int]], shape: tuple[int, int, int]
) -> None:
    cache = some_bytes(*shape)
    expected = cache.clone()
    for source, destination in copies:
        expected[:, destination] = cache[:, source]
    ops.copy_blocks(cache, *(list(column) for column in zip(*copies, strict=True)))
    assert torch.equal(cache, expected)


@SHAPES
@pytest.mark.parametrize("staged", [None, 1, 2**20], ids=["direct", "one at a time", "together"])
def test_blocks_are_saved_and_restored(
    staged: int | None, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`staged`: the bytes of memory on the device through which they go to the host and back."""
    save, restore = ops.save_blocks, ops.restore_blocks
    if staged is not None:
        monkeypatch.setattr(gpu_block_copy, "_STAGED_BYTES", staged)
        save, restore = gpu_block_copy.save_to_host, gpu_block_copy.restore_from_host
    cache, rows = some_bytes(*shape), some_bytes(5, shape[0], shape[2])
    before, expected_rows = cache.clone(), rows.clone()
    for block, index in ((3, 0), (8, 4), (3, 2)):
        expected_rows[index] = cache[:, block]
    save(cache, [3, 8, 3], rows, [0, 4, 2])
    assert torch.equal(rows, expected_rows)
    assert torch.equal(cache, before)
    restore(cache, [1, 5, 0], rows, [4, 1, 0])
    before[:, 1], before[:, 5], before[:, 0] = rows[4], rows[1], rows[0]
    assert torch.equal(cache, before)
    assert torch.equal(rows, expected_rows)
