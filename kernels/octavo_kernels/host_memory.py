"""Large tensors in host memory, on huge pages where the system has them.

Weights and KV blocks are read all over every step, and with pages of 4 KiB the processor spends a tenth of
SmolLM2's decode step looking up addresses (66 against 61 ms at 32 sequences on two cores).
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 8 * 2**20  # a few huge pages; below that there is nothing to gain


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. On a CPU its pages are taken from the system when they are first written.

    Raises `MemoryError`, or on other devices and for small tensors torch's `RuntimeError`, when there is not
    enough.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if device.type != "cpu" or advice is None or num_bytes < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated: {error}") from None
    with contextlib.suppress(OSError):  # a kernel built without huge pages: as good, only slower
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the mapping alive
