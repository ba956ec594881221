"""Large tensors in host memory, on huge pages where the system has them.

Weights and KV blocks are read all over every step, and with pages of 4 KiB the processor spends a tenth of
SmolLM2's decode step looking up addresses (66 against 61 ms at 32 sequences on two cores).
"""

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

_OWN_BYTES = 2**18  # with as many, a tensor has a mapping of its own, which goes back to the system with it
_HUGE_BYTES = 8 * 2**20  # a few huge pages
_CHUNK_BYTES = 64 * 2**20  # that lasting tensors share
_ALIGNMENT = 4096


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. On a CPU its pages are taken from the system when they are first written.

    Raises `MemoryError`, or on other devices and for small tensors torch's `RuntimeError`, when there is not
    enough.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _OWN_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(_map(num_bytes), dtype=dtype).view(shape)  # which keeps the mapping alive


def lasting(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for what stays as long as its model, such as packed weights: those too small for huge pages of
    their own share some, which are given back when the last of them is gone."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not 0 < num_bytes < _HUGE_BYTES:
        return empty(shape, dtype, device)
    memory, offset = _chunk.take(num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


class _Chunk:
    """Memory that is handed out from its beginning on, any thread's turn; never taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._used_bytes = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """The mapping, and the offset of the bytes in it."""
        with self._lock:
            if self._memory is None or self._used_bytes + num_bytes > _CHUNK_BYTES:
                self._memory, self._used_bytes = _map(_CHUNK_BYTES), 0
            offset = self._used_bytes
            self._used_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._memory, offset


_chunk = _Chunk()  # as global as the heap


def _map(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated: {error}") from None
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel built without huge pages: as good, only slower
            memory.madvise(advice)
    return memory
