"""Host memory for evicted blocks: how much there is, and that a block comes back as it left."""

from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol import Swap
from octavo.worker.host_pool import HostPool, host_size
from octavo.worker.kv_cache import KVCache, block_bytes
from tiny_config import MODEL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_blocks_leave_and_come_back_whole_and_nothing_else_moves(dtype: torch.dtype) -> None:
    cache = KVCache(MODEL, 6, 8, dtype, CPU)
    pool = HostPool(cache, 4)
    assert pool.slots[0].nbytes == block_bytes(MODEL, 8, dtype)
    assert pool.slots[2].is_contiguous()
    memory = cache._data.view(torch.uint8)
    memory.copy_(torch.randint(0, 255, memory.shape, generator=torch.Generator().manual_seed(1)))
    before = memory.clone()
    pool.slots.view(torch.uint8).fill_(255)
    pool.swap_out([Swap(4, 0), Swap(1, 3)])
    pool.wait()
    assert torch.equal(memory, before)
    memory[:, :, 4] = 0
    pool.swap_in([Swap(4, 0), Swap(2, 3)])
    pool.wait()
    expected = before.clone()
    expected[:, :, 2] = before[:, :, 1]
    assert torch.equal(memory, expected)
    assert (pool.slots[[1, 2]].view(torch.uint8) == 255).all()


def test_memory_that_there_is_not_is_refused() -> None:
    cache = KVCache(MODEL, 6, 8, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"host memory cannot be allocated: .*; lower swap_space") as caught:
        HostPool(cache, 2**45)
    assert caught.value.key == "swap_space"


@pytest.mark.parametrize(
    ("arguments", "device", "free", "num_blocks", "limit"),
    [
        ({}, CPU, 64 * GIB, 0, "the default of 0.0 MiB"),
        ({}, CUDA, 64 * GIB, 4096, "the default of 4.0 GiB"),
        ({}, CUDA, 2 * GIB, 1024, "half of the free memory = 1.0 GiB"),
        ({"swap_space": 0}, CUDA, 64 * GIB, 0, "swap_space = 0.0 MiB"),
        (
            {"swap_space": 5},
            CUDA,
            64 * GIB,
            4096,
            "4.0 GiB, the power of two below swap_space = 5.0 GiB",
        ),
        (
            {},
            CUDA,
            6 * GIB,
            2048,
            "2.0 GiB, the power of two below half of the free memory = 3.0 GiB",
        ),
        ({"swap_space": 0.5}, CPU, 64 * GIB, 512, "swap_space = 512.0 MiB"),
        ({"swap_space": 10}, CPU, 6 * GIB, 3072, "half of the free memory = 3.0 GiB"),
        (
            {"swap_space": 1, "enable_prefix_caching": False},
            CPU,
            64 * GIB,
            0,
            "enable_prefix_caching = false",
        ),
        ({"preemption_mode": "recompute"}, CUDA, 64 * GIB, 0, "preemption_mode = recompute"),
    ],
    ids=str,
)
def test_there_is_as_much_as_is_asked_for_and_free(
    arguments: dict[str, Any], device: torch.device, free: int, num_blocks: int, limit: str
) -> None:
    size = host_size(EngineConfig(model="m", **arguments), 2**20, device, lambda: free)
    assert (size.num_blocks, size.limit) == (num_blocks, limit)
