"""What goes to the device in a step lies where it should, waits for what it must, and comes back whole."""

from typing import Any

import numpy as np
import pytest
import torch

from fake_gpu import FakeGpu
from octavo.worker.transfers import HOST, GpuTransfers, Transfers

ARRAYS: list[Any] = [
    np.arange(5),
    np.arange(7, dtype=np.int32),
    np.empty((0, 3), np.int32),
    np.linspace(0, 1, 3),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    np.array([[1.5, 2.5]], np.float32),
    np.array([2**62]),
]


@pytest.fixture(params=["host", "gpu"])
def transfers(request: pytest.FixtureRequest) -> Transfers:
    return HOST if request.param == "host" else GpuTransfers(FakeGpu(), 1000)


def test_arrays_arrive_as_they_were(transfers: Transfers) -> None:
    for _ in range(3):
        transfers.begin()
        tensors = [transfers.add(array) for array in ARRAYS]
        transfers.send()
        for array, tensor in zip(ARRAYS, tensors, strict=True):
            assert tensor.dtype == torch.from_numpy(array.copy()).dtype
            assert tensor.numpy().tolist() == array.tolist()


def test_tensors_come_back_as_they_were(transfers: Transfers) -> None:
    tensors = [
        torch.tensor([5, 6, 2**40]),
        torch.tensor([True, False, True]),
        torch.arange(6.0).view(2, 3).T,
        torch.empty(0),
        torch.tensor([[0.1]], dtype=torch.float64),
    ]
    for tensor, array in zip(tensors, transfers.read(tensors), strict=True):
        assert array.shape == tensor.shape
        assert array.tolist() == tensor.tolist()


def test_nothing_is_on_the_device_before_it_is_sent_and_all_by_one_copy() -> None:
    transfers = GpuTransfers(FakeGpu(), 1000)
    transfers._on_device.fill_(0)
    transfers.begin()
    tensors = [transfers.add(array) for array in ARRAYS]
    assert not any(tensor.any() for tensor in tensors)
    begins = [tensor.data_ptr() - transfers._on_device.data_ptr() for tensor in tensors if tensor.numel()]
    assert all(begin % 64 == 0 for begin in begins)
    assert begins == sorted(begins)
    assert begins[-1] < 1000
    transfers.send()
    assert all(tensor.any() for tensor in tensors if tensor.numel())


def test_the_same_arrays_lie_in_the_same_place_even_after_a_step_that_failed() -> None:
    transfers = GpuTransfers(FakeGpu(), 1000)
    places = []
    for failed in (False, True, False):
        transfers.begin()
        places.append([transfers.add(array).data_ptr() for array in ARRAYS])
        if not failed:
            transfers.send()
    assert places[0] == places[1] == places[2]


def test_a_host_buffer_is_filled_again_only_when_its_copy_is_done() -> None:
    gpu = FakeGpu()
    transfers = GpuTransfers(gpu, 1000)
    kept = []
    for number in range(4):
        transfers.begin()
        transfers.add(np.full(4, number))
        transfers.send()
        kept.append(transfers._buffers[0][0].numpy()[:32].view(np.int64))
    # The two take turns, each waiting for the copy that it was in: not for the last one, which may take long.
    first, second = gpu.log[0].split()[1], gpu.log[2].split()[1]
    assert first != second
    expected = [
        f"{what} {buffer}" for buffer in (first, second, first, second) for what in ("wait", "record")
    ]
    assert gpu.log == expected
    assert [array.tolist() for array in kept] == [[2] * 4, [3] * 4] * 2


def test_what_does_not_fit_goes_by_itself_and_the_rest_stays_in_place() -> None:
    transfers = GpuTransfers(FakeGpu(), 256)
    large = np.arange(100.0)
    for _ in range(2):
        transfers.begin()
        small = transfers.add(np.arange(4))
        alone = transfers.add(large)
        more = transfers.add(np.arange(16))
        last = transfers.add(np.arange(9))  # 72 bytes, where 64 are left
        transfers.send()
        assert small.data_ptr() == transfers._on_device.data_ptr()
        assert more.data_ptr() == small.data_ptr() + 64
        assert small.tolist() == [0, 1, 2, 3]
        assert alone.tolist() == large.tolist()
        assert more.tolist() == list(range(16))
        assert last.tolist() == list(range(9))


def test_a_buffer_filled_to_the_last_byte() -> None:
    transfers = GpuTransfers(FakeGpu(), 100)
    transfers.begin()
    tensors = transfers.add(np.arange(8)), transfers.add(np.arange(9, dtype=np.int32))
    transfers.send()
    assert [tensor.tolist() for tensor in tensors] == [list(range(8)), list(range(9))]
