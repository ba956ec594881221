"""The KV cache: how many blocks there are, and the tensors that hold them.

Block ids are the scheduler's; here they are the first axis of every layer's tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.layers.inputs import LayerCache
from octavo.models.model_config import ModelConfig
from octavo.worker.block_files import Payload
from octavo.worker.memory import available_bytes, readable
from octavo_kernels import host_memory, kv_format, ops

_CPU_SHARE = 4  # of the memory that is free, one part in so many
_CPU_MOST_BYTES = 4 * 2**30
_GPU_SPARE = 0.02  # of a GPU that is full, for what its libraries take later


class KVCache:
    """K and V of all layers for N blocks of type `dtype`, in one tensor [layers, 2, N, Hkv, B, D]; where that
    quantises, [layers, 2, N, Hkv, B * (D + 2)], so that a block's scales go wherever the block is copied.

    Not cleared: attention ignores slots that were never written, and memory that is never touched is never
    taken from the system.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        block = kv_format.block_shape(config.num_kv_heads, block_size, config.head_size, dtype)
        # Bytes where it is quantised: torch copies few things in float8.
        memory_dtype = torch.uint8 if kv_format.is_quantised(dtype) else dtype
        self._data = host_memory.empty((config.num_layers, 2, num_blocks, *block), memory_dtype, device)
        self.layers = [LayerCache(layer[0], layer[1]) for layer in self._data.view(dtype)]
        # Of each layer the keys and the values: [planes, N, bytes].
        self.planes = self._data.view(torch.uint8).flatten(3).flatten(0, 1)
        self.layouts = (ops.KVLayout(config.num_kv_heads, block_size, None, device),)  # by KV group

    def block(self, block_id: int) -> Tensor:
        """[layers, 2, ...]: what one block has of all layers, its scales included."""
        return self._data[:, :, block_id]

    def content(self, block_id: int) -> Payload:
        """A copy of what `block` has, as bytes."""
        num_planes, _, num_bytes = self.planes.shape
        rows = torch.empty(1, num_planes, num_bytes, dtype=torch.uint8)
        ops.save_blocks(self.planes, [block_id], rows, [0])
        content: Payload = rows.view(-1).numpy()
        return content

    def set_content(self, block_id: int, content: Payload) -> None:
        """The reverse of `content`."""
        num_planes, _, num_bytes = self.planes.shape
        rows = torch.from_numpy(content).view(1, num_planes, num_bytes)
        ops.restore_blocks(self.planes, [block_id], rows, [0])

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks. Every source is read before any destination is written."""
        ops.copy_blocks(self.planes, sources, destinations)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """What one block takes in all layers, of type `dtype` as `KVCache` takes it."""
    block = kv_format.block_shape(config.num_kv_heads, block_size, config.head_size, dtype)
    return 2 * config.num_layers * math.prod(block) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSize:
    num_blocks: int
    limit: str  # which limit bound, for people


def cache_size(
    config: EngineConfig,
    bytes_per_block: int,
    device: torch.device,
    profile: Callable[[], int],
    *,
    cuda: "CudaMemory | None" = None,
    available: Callable[[], int] = available_bytes,
) -> CacheSize:
    """How many blocks there are to be, when the weights are in place already.

    `profile` runs the largest step there can be, and returns how many bytes will be kept beside it (graphs);
    on a GPU both are left free. Raises `ConfigError` when one sequence of `max_model_len` does not fit.
    """
    assert config.max_model_len is not None
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        limit = f"num_gpu_blocks_override = {num_blocks}"
        hint = f"raise num_gpu_blocks_override to {blocks_per_sequence}"
    else:
        least_bytes = blocks_per_sequence * bytes_per_block
        hint = f"set kv_cache_memory_bytes to {least_bytes} ({readable(least_bytes)})"
        if config.kv_cache_memory_bytes is not None:
            budget_bytes = config.kv_cache_memory_bytes
            limit = f"kv_cache_memory_bytes = {readable(budget_bytes)}"
        elif device.type == "cuda":
            share = config.gpu_memory_utilization
            budget_bytes, room_bytes = _gpu_budget(share, device, profile, cuda or torch.cuda)
            limit = f"gpu_memory_utilization = {share} ({readable(budget_bytes)})"
            hint = "raise gpu_memory_utilization"
            if room_bytes < budget_bytes:
                budget_bytes = room_bytes
                limit = f"what others leave of the GPU ({readable(room_bytes)})"
                hint = (
                    "lower gpu_memory_utilization of the models that share the GPU, so that all add up to 1"
                )
        else:
            budget_bytes = min(available() // _CPU_SHARE, _CPU_MOST_BYTES)
            limit = f"a quarter of the free memory = {readable(budget_bytes)}"
            if budget_bytes == _CPU_MOST_BYTES:
                limit = f"the default of at most {readable(budget_bytes)} on a CPU"
        num_blocks = budget_bytes // bytes_per_block
        useful = config.max_num_seqs * blocks_per_sequence
        if num_blocks > useful:
            num_blocks = useful
            limit = f"max_num_seqs x max_model_len = {config.max_num_seqs} x {config.max_model_len} tokens"
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"the KV cache would hold {max(num_blocks, 0) * config.block_size} tokens ({limit}), less than "
            f"one sequence of 'max_model_len' ({config.max_model_len}); {hint}, or lower max_model_len"
        )
    return CacheSize(num_blocks, limit)


class CudaMemory(Protocol):
    """The part of `torch.cuda` that a memory profile needs."""

    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self, device: torch.device, /) -> None: ...
    def max_memory_allocated(self, device: torch.device, /) -> int: ...
    def memory_reserved(self, device: torch.device, /) -> int: ...
    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]: ...


def _gpu_budget(
    utilization: float, device: torch.device, profile: Callable[[], int], cuda: CudaMemory
) -> tuple[int, int]:
    """Bytes that are left beside the weights, the largest step and graphs: of our share of the GPU, and of
    all that others (and the CUDA context) do not hold.

    The share is this instance's own, as with vLLM: what others hold does not count against it, so that two
    models get the same whichever is loaded first.
    """
    cuda.empty_cache()
    cuda.reset_peak_memory_stats(device)
    kept_bytes = profile()
    peak_bytes = cuda.max_memory_allocated(device) + kept_bytes
    cuda.empty_cache()
    free_bytes, total_bytes = cuda.mem_get_info(device)
    others_bytes = total_bytes - free_bytes - cuda.memory_reserved(device)
    spare_bytes = int(total_bytes * _GPU_SPARE)
    room_bytes = total_bytes - others_bytes - peak_bytes - spare_bytes
    return int(total_bytes * utilization) - peak_bytes, max(room_bytes, 0)
