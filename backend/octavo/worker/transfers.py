"""What goes from the host to the device in a step, and what comes back: one copy each way.

`worker.model_input` adds the step's arrays and sends them; the executor reads the sampled tokens. On a CPU
both are views and cost nothing. One thread at a time. Why it is so: ADR 11.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.worker.gpu import Gpu

_ALIGNMENT = 64  # bytes: of whatever a kernel may load at once


class Transfers(Protocol):
    def begin(self) -> None:
        """A step's arrays follow. What was added before may go."""

    def add(self, array: NDArray[Any]) -> Tensor:
        """`array` on the device, from `send` on. It must not change until the step is done. Arrays of the
        same sizes, added in the same order from `begin` on, lie in the same place in every step, but for
        those that there is no room for."""

    def send(self) -> None:
        """Queues the copy of all that was added."""

    def read(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        """Their values, once all that was queued before is done. The results may share their memory."""


class HostTransfers:
    """Of a CPU, where all is in place."""

    def begin(self) -> None:
        pass

    def add(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def send(self) -> None:
        pass

    def read(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in tensors]


HOST = HostTransfers()


class GpuTransfers:
    """A step has `num_bytes`, on the device and twice on the host; what does not fit goes by itself."""

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self._gpu = gpu
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device)
        self._buffers = [(gpu.pinned(num_bytes), gpu.event()) for _ in range(2)]
        self._used = 0

    def begin(self) -> None:
        self._buffers.reverse()
        self._buffers[0][1].synchronize()  # its last copy was two steps ago
        self._used = 0

    def add(self, array: NDArray[Any]) -> Tensor:
        host, _ = self._buffers[0]
        begin, end = self._used, self._used + array.nbytes
        if end > len(host):
            return self._send_alone(array)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._on_device[begin:end].view(_fill(host[begin:end], array)).view(array.shape)

    def send(self) -> None:
        host, copied = self._buffers[0]
        end = min(self._used, len(host))
        self._on_device[:end].copy_(host[:end], non_blocking=True)
        copied.record()

    def read(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        flat = [tensor.flatten() for tensor in tensors]
        together = torch.cat([tensor.view(torch.uint8) for tensor in flat]).cpu()
        results, begin = [], 0
        for tensor in tensors:
            part = together[begin : begin + tensor.nbytes].clone()  # which begins where numbers may
            results.append(part.view(tensor.dtype).view(tensor.shape).numpy())
            begin += tensor.nbytes
        return results

    def _send_alone(self, array: NDArray[Any]) -> Tensor:
        host = self._gpu.pinned(array.nbytes)  # torch hands it out again only when the copy is done
        dtype = _fill(host, array)
        return host.to(self._gpu.device, non_blocking=True).view(dtype).view(array.shape)


def _fill(memory: Tensor, array: NDArray[Any]) -> torch.dtype:
    """Puts `array` into `memory` [array.nbytes] uint8. Returns its type."""
    numbers = memory.numpy().view(array.dtype)
    numbers.reshape(array.shape)[...] = array
    return torch.from_numpy(numbers).dtype
