"""How much of a checkpoint fits, told from its files alone: the worker's own arithmetic before the weights.

Used by `octavo check`. What only a loaded model can tell, the memory of its largest step, is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from octavo.config import EngineConfig
from octavo.models.model_config import ModelConfig
from octavo.weights.loader import open_checkpoint
from octavo.worker.executor import resolve_device, resolve_dtype
from octavo.worker.kv_cache import block_bytes, cache_size
from octavo.worker.memory import available_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    path: str
    architecture: str
    num_layers: int
    dtype: str
    device: str
    weight_bytes: int  # as they are computed with, unquantised
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    limit: str  # which limit bound the number of blocks, for people
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at once."""
        return self.num_tokens / self.max_model_len


def estimate(config: EngineConfig, available: Callable[[], int] = available_bytes) -> Capacity:
    """Raises `ConfigError` or `WeightsError` like the worker: no checkpoint or not a supported one, no such
    device, or a cache too small for one sequence."""
    checkpoint = open_checkpoint(config.model)
    model_config = ModelConfig.from_dict(checkpoint.config())
    config = config.for_model(model_config.max_positions)
    assert config.max_model_len is not None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config.torch_dtype, device)
    weight_bytes = dtype.itemsize * sum(prod(checkpoint.shape(name)) for name in checkpoint.names())
    bytes_per_block = block_bytes(model_config, config.block_size, dtype)
    size = cache_size(
        config,
        bytes_per_block,
        device,
        profile=lambda: None,
        cuda=_WithWeights(weight_bytes),
        available=lambda: max(available() - weight_bytes, 0),
    )
    return Capacity(
        path=str(checkpoint.path),
        architecture=model_config.architecture,
        num_layers=model_config.num_layers,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=bytes_per_block // config.block_size,
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        limit=size.limit,
        max_model_len=config.max_model_len,
    )


class _WithWeights:
    """The GPU's memory as it will be when the weights are in it. Implements `CudaMemory`."""

    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: torch.device, /) -> None:
        pass

    def max_memory_allocated(self, device: torch.device, /) -> int:
        return self._weight_bytes

    def memory_reserved(self, device: torch.device, /) -> int:
        return 0

    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return free_bytes, total_bytes
