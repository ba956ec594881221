"""CUDA as the worker uses it, against a fake of `torch.cuda` that writes down what it is asked for."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import Engine
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.worker.capacity import estimate
from octavo.worker.gpu import BLOCK_SIZES, MOST_HEAD_SIZE, CudaGpu, check_gpu, open_gpu
from octavo_kernels import gpu as gpu_kernels
from tiny import tiny_llama
from tiny_config import MODEL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeCuda:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.num_pools = 0
        self.error: Exception | None = None

    def Stream(self, device: torch.device) -> str:
        self.log.append(f"stream on {device}")
        return "the stream"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.log.append(f"enter {stream}")
        yield
        self.log.append(f"leave {stream}")

    def Event(self) -> Any:
        return "an event"

    def CUDAGraph(self) -> Any:
        log = self.log

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        return Graph()

    @contextmanager
    def graph(self, cuda_graph: Any, *, pool: str, stream: str, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture into {pool} from {stream}, errors {capture_error_mode}")
        yield
        self.log.append("captured")

    def graph_pool_handle(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 12, 34

    def synchronize(self, device: torch.device) -> None:
        if self.error is not None:
            raise self.error


def pin(tensor: Tensor) -> Tensor:
    return tensor.fill_(3)


def test_all_is_asked_of_cuda_as_it_wants_it() -> None:
    cuda = FakeCuda()
    gpu = CudaGpu(CUDA, cuda, pin)
    with gpu.stream():
        cuda.log.append("work")
    assert cuda.log == ["stream on cuda", "enter the stream", "work", "leave the stream"]
    assert gpu.device == CUDA
    assert gpu.pinned(2).tolist() == [3, 3]
    assert gpu.event() == "an event"
    cuda.log.clear()
    assert gpu.free_bytes() == 12
    assert cuda.log == ["empty cache"]  # before it is asked


def test_a_capture_records_the_work_on_the_stream_of_the_steps() -> None:
    cuda = FakeCuda()
    gpu = CudaGpu(CUDA, cuda, pin)
    cuda.log.clear()
    output = torch.zeros(3)

    def work() -> Tensor:
        cuda.log.append("work")
        return output

    captured = gpu.capture(work, gpu.graph_pool())
    captured.replay()
    assert captured.output is output
    assert cuda.log == [
        "capture into pool 1 from the stream, errors thread_local",
        "work",
        "captured",
        "replay",
    ]
    assert gpu.graph_pool() == "pool 2"  # of the first, no graph may be left


def test_a_capture_that_fails_is_ended_in_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends it only where CUDA has not ended it already, and takes it amiss where there is none."""
    ended: list[Any] = []

    def end(device: int, pool: str) -> None:
        ended.append((device, pool))
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    gpu = CudaGpu(CUDA, FakeCuda(), pin)

    def work() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        gpu.capture(work, "the pool")
    assert ended == [(3, "the pool")]


def test_a_gpu_that_answers_no_more_is_lost() -> None:
    cuda = FakeCuda()
    gpu = CudaGpu(CUDA, cuda, pin)
    assert not gpu.is_lost()
    cuda.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert gpu.is_lost()


@pytest.mark.parametrize("served", [False, True])
def test_only_kernels_of_the_gpu_are_captured(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    monkeypatch.setattr(gpu_kernels, "serves", lambda x: served and x.device == CPU)
    assert CudaGpu(CPU, FakeCuda(), pin).can_capture == served


def test_torch_has_what_is_asked_of_it() -> None:
    """The names and parameters; that they do what they say takes a card."""
    for name in (
        "Stream",
        "stream",
        "Event",
        "CUDAGraph",
        "graph_pool_handle",
        "empty_cache",
        "mem_get_info",
        "synchronize",
    ):
        assert callable(getattr(torch.cuda, name))
    assert callable(torch._C._cuda_endAllocateToPool)
    assert issubclass(torch.AcceleratorError, RuntimeError)
    parameters = inspect.signature(torch.cuda.graph).parameters
    assert {"cuda_graph", "pool", "stream", "capture_error_mode"} <= parameters.keys()


def test_a_cpu_has_no_gpu_and_computes_everything() -> None:
    assert open_gpu(CPU) is None
    check_gpu(EngineConfig("m", block_size=1), dataclasses.replace(MODEL, head_size=512), CPU)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def check(
        capability: tuple[int, int] = (9, 0),
        block_size: int = 16,
        head_size: int = 64,
        kv_cache_dtype: str = "auto",
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        model = dataclasses.replace(MODEL, head_size=head_size)
        config = EngineConfig("m", block_size=block_size, kv_cache_dtype=kv_cache_dtype)
        check_gpu(config, model, CUDA)

    return check


def test_what_the_kernels_have_is_taken(check: Callable[..., None]) -> None:
    check((8, 0), 8, 64)
    check((12, 0), 128, 256)
    check((9, 0), 16, 66)
    check((9, 0), 16, 68, "int8")


def test_the_kernels_say_the_same() -> None:
    from octavo_kernels.gpu import paged_attention

    assert paged_attention.BLOCK_SIZES == BLOCK_SIZES
    assert paged_attention.MAX_HEAD_SIZE == MOST_HEAD_SIZE


def test_an_old_gpu_is_refused(check: Callable[..., None]) -> None:
    with pytest.raises(ConfigError) as raised:
        check(capability=(7, 5))
    assert str(raised.value) == (
        "the GPU has compute capability 7.5; what is computed on one needs 8.0 (A100) or newer; "
        "use 'device': 'cpu'"
    )
    assert raised.value.key == "device"


@pytest.mark.parametrize("block_size", [1, 4, 12, 256])
def test_block_sizes_without_a_kernel_are_refused(check: Callable[..., None], block_size: int) -> None:
    with pytest.raises(ConfigError) as raised:
        check(block_size=block_size)
    assert str(raised.value) == f"'block_size' is {block_size}; allowed on a GPU: 8, 16, 32, 64, 128"
    assert raised.value.key == "block_size"


def test_large_heads_are_refused(check: Callable[..., None]) -> None:
    with pytest.raises(
        ConfigError, match="heads have size 320; on a GPU it may be 256 at most; use 'device'"
    ):
        check(head_size=320)


def test_quantised_heads_of_odd_sizes_are_refused(check: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match=r"'kv_cache_dtype' is 'fp8'; .* heads have size 66, no") as raised:
        check(head_size=66, kv_cache_dtype="fp8")
    assert raised.value.key == "kv_cache_dtype"


def test_weights_without_a_kernel_of_their_own_are_taken_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for quantization in (None, "int8"):
        assert not caplog.messages
        check_gpu(EngineConfig("m", quantization=quantization), MODEL, CUDA)
    (line,) = caplog.messages
    assert line.startswith(
        "'quantization' is 'int8', whose products run as the slow torch reference on a GPU"
    )


def test_an_engine_and_a_check_say_so_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = EngineConfig(str(tmp_path), block_size=4)
    for build in (Engine, estimate):
        with pytest.raises(ConfigError, match="'block_size' is 4; allowed on a GPU"):
            build(config)
