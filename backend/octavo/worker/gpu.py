"""What the worker asks of CUDA, and the one stream that all of it runs on.

A `Gpu` is the seam: steps, transfers and graphs are written against it, so that a fake whose tensors lie in
host memory walks every branch of theirs (`tests/fake_gpu.py`). `CudaGpu` is the real one, thin, and itself
written against the part of `torch.cuda` that it uses. Made by the executor; one thread at a time. The design:
`backend/docs/adr/0011-a-gpu-step-is-one-upload-a-graph-and-one-download.md`.
"""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.model_config import ModelConfig
from octavo_kernels import gpu as gpu_kernels
from octavo_kernels.gpu import LEAST_CAPABILITY

log = logging.getLogger("octavo")

# Of `octavo_kernels.gpu.paged_attention`, which only those can import who have triton.
BLOCK_SIZES = (8, 16, 32, 64, 128)
MOST_HEAD_SIZE = 256


class Event(Protocol):
    def record(self) -> None:
        """Now, in the current stream."""

    def synchronize(self) -> None:
        """Returns when what was queued before `record` is done; at once when nothing was recorded."""


class Captured(NamedTuple):
    """Work that was recorded with the addresses that it used, and where its result is after each replay."""

    replay: Callable[[], None]
    output: Tensor


class Gpu(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def can_capture(self) -> bool:
        """Whether kernels take a step's integers from the device alone. The torch reference does not."""

    def stream(self) -> AbstractContextManager[Any]:
        """What is done inside is queued on the worker's stream."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that copies to and from the device need not wait for: [num_bytes] uint8."""

    def event(self) -> Event: ...

    def graph_pool(self) -> Any:
        """Memory that some graphs share, which run one after the other."""

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Captured:
        """Records `work`, without doing it. It must have been done once on the same tensors. Raises what CUDA
        or a kernel has against it; then there is no more capturing into this pool."""

    def free_bytes(self) -> int:
        """Of the device, once torch has given back what it only keeps."""

    def is_lost(self) -> bool:
        """Whether it refuses all further work of this process: after an address that is not there, say.
        Waits for what is queued."""


class Cuda(Protocol):
    """The part of `torch.cuda` that `CudaGpu` uses."""

    def Stream(self, device: torch.device, /) -> Any: ...
    def stream(self, stream: Any, /) -> AbstractContextManager[Any]: ...
    def Event(self) -> Event: ...
    def CUDAGraph(self) -> Any: ...
    def graph(
        self, cuda_graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
    ) -> AbstractContextManager[Any]: ...
    def graph_pool_handle(self) -> Any: ...
    def empty_cache(self) -> None: ...
    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]: ...
    def synchronize(self, device: torch.device, /) -> None: ...


class CudaGpu:
    """Implements `Gpu`."""

    def __init__(
        self,
        device: torch.device,
        cuda: Cuda = torch.cuda,
        pin: Callable[[Tensor], Tensor] = Tensor.pin_memory,
    ) -> None:
        self.device = device
        self._cuda = cuda
        self._pin = pin
        self._stream = cuda.Stream(device)

    @property
    def can_capture(self) -> bool:
        return gpu_kernels.serves(torch.empty(0, device=self.device))

    def stream(self) -> AbstractContextManager[Any]:
        return self._cuda.stream(self._stream)

    def pinned(self, num_bytes: int) -> Tensor:
        return self._pin(torch.empty(num_bytes, dtype=torch.uint8))

    def event(self) -> Event:
        return self._cuda.Event()

    def graph_pool(self) -> Any:
        # A new one each time: torch lets none be captured into again once the last of its graphs is gone.
        return self._cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Captured:
        graph = self._cuda.CUDAGraph()
        try:
            # Other threads may go on with CUDA meanwhile: another model instance of the same process, say.
            with self._cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                output = work()
        except Exception:
            # Where CUDA itself broke the capture off, torch's allocator takes it to be under way for ever,
            # and gives back no memory any more. Elsewhere there is nothing to end, which is an error too.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
        return Captured(graph.replay, output)

    def free_bytes(self) -> int:
        self._cuda.empty_cache()
        return self._cuda.mem_get_info(self.device)[0]

    def is_lost(self) -> bool:
        try:
            self._cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False


def open_gpu(device: torch.device) -> Gpu | None:
    """None for a CPU."""
    return None if device.type == "cpu" else CudaGpu(device)


def check_gpu(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> None:
    """Raises `ConfigError` for what the GPU's kernels do not have; a CPU has all."""
    if device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"the GPU has compute capability {_version(capability)}; what is computed on one needs "
            f"{_version(LEAST_CAPABILITY)} (A100) or newer; use 'device': 'cpu'",
            "device",
        )
    if config.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"'block_size' is {config.block_size}; allowed on a GPU: {sizes}", "block_size")
    if config.kv_cache_dtype != "auto" and model_config.head_size % 4:
        raise ConfigError(
            f"'kv_cache_dtype' is '{config.kv_cache_dtype}'; on a GPU only 'auto' for this model, whose "
            f"attention heads have size {model_config.head_size}, no multiple of 4",
            "kv_cache_dtype",
        )
    if model_config.head_size > MOST_HEAD_SIZE:
        raise ConfigError(
            f"the model's attention heads have size {model_config.head_size}; on a GPU it may be "
            f"{MOST_HEAD_SIZE} at most; use 'device': 'cpu'",
            "device",
        )
    if config.quantization == "int8":
        log.warning(
            "'quantization' is 'int8', whose products run as the slow torch reference on a GPU: weights take "
            "less memory, and steps far more time than without it"
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
