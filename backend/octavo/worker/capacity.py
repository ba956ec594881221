"""How much of a checkpoint fits, told from its files alone: the worker's own arithmetic before the weights.

Used by `octavo check`. What only a loaded model can tell, the memory of its largest step and of CUDA graphs,
is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.quant.base import Scheme, Unquantised, Weight
from octavo.weights.loader import open_checkpoint
from octavo.worker.disk_pool import directory_bytes
from octavo.worker.executor import resolve_device, resolve_dtype, resolve_kv_dtype, resolve_scheme
from octavo.worker.gpu import check_gpu
from octavo.worker.host_pool import host_size
from octavo.worker.kv_cache import block_bytes, cache_size
from octavo.worker.memory import available_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    path: str
    architecture: str
    num_layers: int
    dtype: str
    device: str
    quantization: str | None  # how weights are computed with; what a GGUF file has is undone when it is read
    weight_bytes: int  # as they are computed with
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    limit: str  # which limit bound the number of blocks, for people
    max_model_len: int
    num_host_blocks: int  # in host memory, for those that are evicted
    host_limit: str
    directory: str | None  # of the prefix cache
    directory_bytes: int  # that may lie there

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at once."""
        return self.num_tokens / self.max_model_len


def estimate(config: EngineConfig, available: Callable[[], int] = available_bytes) -> Capacity:
    """Raises `ConfigError` or `WeightsError` like the worker: no checkpoint or not a supported one, no such
    device or one that cannot compute this, or a cache too small for one sequence."""
    checkpoint = open_checkpoint(config.model)
    model_config = ModelConfig.from_dict(checkpoint.config())
    config = config.for_model(model_config.max_positions)
    assert config.max_model_len is not None
    device = resolve_device(config.device)
    check_gpu(config, model_config, device)
    dtype = resolve_dtype(config.dtype, model_config.torch_dtype, device)
    scheme = resolve_scheme(config.quantization)
    weight_bytes = num_weight_bytes(model_config, scheme, dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    bytes_per_block = block_bytes(model_config, config.block_size, kv_dtype)
    size = cache_size(
        config,
        bytes_per_block,
        device,
        profile=lambda: 0,
        cuda=_WithWeights(weight_bytes),
        available=lambda: max(available() - weight_bytes, 0),
    )
    host = host_size(config, bytes_per_block, device, lambda: max(available() - weight_bytes, 0))
    return Capacity(
        path=str(checkpoint.path),
        architecture=model_config.architecture,
        num_layers=model_config.num_layers,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        quantization=None if config.quantization == "gguf" else config.quantization,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=bytes_per_block // config.block_size,
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        limit=size.limit,
        max_model_len=config.max_model_len,
        num_host_blocks=host.num_blocks,
        host_limit=host.limit,
        directory=config.prefix_cache_dir,
        directory_bytes=directory_bytes(config, bytes_per_block),
    )


def num_weight_bytes(
    model_config: ModelConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> int:
    """What a model's weights take once they are loaded. It is built as the worker builds it, but of tensors
    without memory. Raises `ConfigError` for an architecture without code."""
    measure = _Measure(scheme, device)
    model = build_model(model_config, dtype, torch.device("meta"), scheme=measure)
    dense_bytes = sum(view.nbytes for _, view in model.weight_map())
    model.finish_loading()
    return dense_bytes + measure.more_bytes


class _Measure(Unquantised):
    """Adds up what `scheme` would take on `device` beyond the plain weights that are made here; less than
    nothing where it takes less."""

    def __init__(self, scheme: Scheme, device: torch.device) -> None:
        self._scheme = scheme
        self._device = device
        self.more_bytes = 0

    def make_weight(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        self.more_bytes += self._scheme.num_bytes(out_features, in_features, dtype)
        self.more_bytes -= self.num_bytes(out_features, in_features, dtype)
        return super().make_weight(out_features, in_features, dtype, device)

    def weight_of(self, matrix: Tensor) -> Weight:
        rows, columns = matrix.shape
        self.more_bytes += self._scheme.num_copied_bytes(rows, columns, matrix.dtype, self._device)
        return super().weight_of(matrix)


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
