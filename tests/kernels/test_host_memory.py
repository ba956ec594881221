"""Large host tensors: shape, alignment, writability, and that pages are taken only when written."""

import gc
import mmap
import resource
from pathlib import Path

import pytest
import torch

from octavo_kernels import host_memory

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("shape", [(3, 5), (4, 1024, 1024)])
def test_a_tensor_like_any_other(shape: tuple[int, ...]) -> None:
    tensor = host_memory.empty(shape, torch.bfloat16, CPU)
    assert tensor.shape == shape
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(3.0)
    gc.collect()
    assert float(tensor.float().mean()) == 3.0


def test_memory_is_taken_when_written_and_given_back() -> None:
    before = resident_bytes()
    tensor = host_memory.empty((2**31,), torch.bfloat16, CPU)  # 4 GiB
    assert resident_bytes() - before < 2**26
    tensor[: 2**27] = 1.0
    assert resident_bytes() - before > 2**27
    del tensor
    assert resident_bytes() - before < 2**26


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert host_memory.empty((4, 1024, 1024), torch.float32, CPU).shape == (4, 1024, 1024)


def test_a_kernel_that_refuses_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    tensor = host_memory.empty((4, 1024, 1024), torch.float32, CPU)
    tensor.fill_(1.0)
    assert float(tensor.mean()) == 1.0


def test_more_than_there_is() -> None:
    for num_bytes in (2**50, 2**63):
        with pytest.raises(MemoryError, match=rf"^{num_bytes} bytes cannot be allocated: "):
            host_memory.empty((num_bytes,), torch.uint8, CPU)


def test_other_devices_allocate_their_own() -> None:
    assert host_memory.empty((2**24,), torch.float32, torch.device("meta")).device.type == "meta"
