"""A GPU that is none: `Gpu` on tensors in host memory, so that every branch is walked without a card.

What it cannot show is that CUDA does the same; what it does show is that a replay with other numbers in the
same places computes what an eager step computes, and that nothing is captured or replayed on another stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo.worker.gpu import Captured


class FakeEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def record(self) -> None:
        self._log.append(f"record {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


class FakeGpu:
    """`captured` and `replayed` are sizes of batches; capturing one of `fails_at` fails. Implements `Gpu`."""

    device = torch.device("cpu")
    can_capture = True  # the native kernels take all from the tensors too

    def __init__(self, fails_at: tuple[int, ...] = ()) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.log: list[str] = []
        self.free = 2**30
        self.lost = False
        self._fails_at = fails_at
        self._is_current = False
        self._num_events = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        assert not self._is_current
        self._is_current = True
        try:
            yield
        finally:
            self._is_current = False

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def event(self) -> FakeEvent:
        self._num_events += 1
        return FakeEvent(self.log, str(self._num_events))

    def graph_pool(self) -> Any:
        return None

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Captured:
        """What the work writes is written here already, a second time; only a replay gives the result."""
        assert self._is_current, "captured on another stream than steps run on"
        output = work()
        size = len(output)
        if size in self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        output.fill_(torch.nan)
        self.captured.append(size)
        self.free -= 1000 * size

        def replay() -> None:
            assert self._is_current, "replayed on another stream"
            output.copy_(work())
            self.replayed.append(size)

        return Captured(replay, output)

    def free_bytes(self) -> int:
        return self.free

    def is_lost(self) -> bool:
        return self.lost
