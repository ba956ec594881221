"""Host memory for KV blocks that the device has evicted: how many fit, and the copies to it and back.

Which slot holds what is for `engine/host_blocks.py` to know; here a slot is a row of one tensor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol import Swap
from octavo.worker.kv_cache import CacheSize, KVCache
from octavo.worker.memory import available_bytes, readable
from octavo_kernels import host_memory, ops

_DEFAULT_BYTES = 4 * 2**30  # beside a GPU
_MOST_SHARE = 2  # of the memory that is free, one part in so many


class HostPool:
    """`slots` [slots, layers, 2, ...]: of each the content of one block of `cache`, all layers in one piece.

    Pinned beside a GPU, so that a block takes one transfer; on a CPU, memory like that of the blocks, taken
    from the system as slots are first written. Raises `ConfigError` when there is not enough.
    """

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self._cache = cache
        block = cache.block(0)
        self._device = block.device
        shape = (num_slots, *block.shape)
        try:
            if self._device.type == "cpu":
                self.slots: Tensor = host_memory.empty(shape, block.dtype, self._device)
            else:
                self.slots = torch.empty(shape, dtype=block.dtype, pin_memory=True)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"{num_slots} KV blocks of host memory cannot be allocated: {error}; lower swap_space",
                "swap_space",
            ) from error
        self._rows = self.slots.view(torch.uint8).flatten(3).flatten(1, 2)  # [slots, planes, bytes]

    def swap_out(self, swaps: Sequence[Swap]) -> None:
        blocks, slots = [block_id for block_id, _ in swaps], [slot for _, slot in swaps]
        ops.save_blocks(self._cache.planes, blocks, self._rows, slots)

    def swap_in(self, swaps: Sequence[Swap]) -> None:
        blocks, slots = [block_id for block_id, _ in swaps], [slot for _, slot in swaps]
        ops.restore_blocks(self._cache.planes, blocks, self._rows, slots)

    def wait(self) -> None:
        """Until all copies are made: a GPU makes them by itself."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def host_size(
    config: EngineConfig,
    bytes_per_block: int,
    device: torch.device,
    available: Callable[[], int] = available_bytes,
) -> CacheSize:
    """How many slots there are to be. A cache is no reason not to start: where less is free than `swap_space`
    asks for, it is smaller."""
    if config.swap_space is None:
        wanted_bytes = _DEFAULT_BYTES if device.type == "cuda" else 0
        limit = f"the default of {readable(wanted_bytes)}"
    else:
        wanted_bytes = int(config.swap_space * 2**30)
        limit = f"swap_space = {readable(wanted_bytes)}"
    if not config.enable_prefix_caching:
        return CacheSize(0, "enable_prefix_caching = false")
    if config.preemption_mode == "recompute":
        return CacheSize(0, "preemption_mode = recompute")
    free_bytes = available() // _MOST_SHARE if wanted_bytes else 0
    if free_bytes < wanted_bytes:
        wanted_bytes, limit = free_bytes, f"half of the free memory = {readable(free_bytes)}"
    if device.type == "cuda" and wanted_bytes & (wanted_bytes - 1):
        # Torch takes the next power of two for pinned memory: of 5 GiB it would make 8.
        wanted_bytes = 1 << (wanted_bytes.bit_length() - 1)
        limit = f"{readable(wanted_bytes)}, the power of two below {limit}"
    return CacheSize(wanted_bytes // bytes_per_block, limit)
