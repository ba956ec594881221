"""Copies of whole blocks, on a CPU and by the reference: spelled out block by block."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from octavo_kernels import ops, reference
from octavo_kernels.cpu import block_copy as cpu_block_copy

MODULES = pytest.mark.parametrize(
    "module", [cpu_block_copy, reference.block_copy, ops], ids=["cpu", "ref", "ops"]
)


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


@MODULES
def test_sources_are_read_before_destinations_are_written(module: ModuleType) -> None:
    cache = some_bytes(4, 7, 33)
    expected = cache.clone()
    for source, destination in ((0, 1), (1, 2), (2, 0), (6, 5)):
        expected[:, destination] = cache[:, source]
    module.copy_blocks(cache, [0, 1, 2, 6], [1, 2, 0, 5])
    assert torch.equal(cache, expected)


@MODULES
def test_blocks_are_saved_and_restored(module: ModuleType) -> None:
    cache, rows = some_bytes(4, 7, 33), some_bytes(5, 4, 33)
    before, expected_rows = cache.clone(), rows.clone()
    for block, index in ((3, 0), (6, 4), (3, 2)):
        expected_rows[index] = cache[:, block]
    module.save_blocks(cache, [3, 6, 3], rows, [0, 4, 2])
    assert torch.equal(rows, expected_rows)
    assert torch.equal(cache, before)
    module.restore_blocks(cache, [1, 5], rows, [4, 1])
    before[:, 1], before[:, 5] = rows[4], rows[1]
    assert torch.equal(cache, before)


def test_no_blocks_at_all() -> None:
    cache, rows = some_bytes(2, 3, 8), some_bytes(1, 2, 8)
    before = cache.clone()
    ops.copy_blocks(cache, [], [])
    ops.save_blocks(cache, [], rows, [])
    ops.restore_blocks(cache, [], rows, [])
    assert torch.equal(cache, before)
