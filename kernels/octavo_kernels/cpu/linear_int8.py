"""Native `ops.linear_int8`; see there for shapes."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.cpu.library import TYPES

_PANEL = 32  # as linear.h has it
_LARGEST_SUM = 2**31


def takes(lib: ctypes.CDLL, weight: Tensor) -> bool:
    columns = weight.shape[1]
    return (
        hasattr(lib, "octavo_linear_int8")
        and weight.is_contiguous()
        and columns % 4 == 0
        and columns * 255 * 127 < _LARGEST_SUM
    )


def pack(lib: ctypes.CDLL, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The packed weight, and scales and sums of its rows, padded to whole panels."""
    rows, columns = weight.shape
    padding = -rows % _PANEL
    packed = weight.new_empty((rows + padding) * columns)
    lib.octavo_pack_linear(weight.data_ptr(), packed.data_ptr(), rows, columns, 2)
    return packed, F.pad(scales, (0, padding)), F.pad(weight.sum(dim=1, dtype=torch.int32), (0, padding))


def linear(
    lib: ctypes.CDLL, x: Tensor, parts: tuple[Tensor, Tensor, Tensor], out_features: int, bias: Tensor | None
) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    packed, scales, sums = parts
    rows, in_features = x.shape
    out = x.new_empty((rows, out_features))
    failed = lib.octavo_linear_int8(
        x.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        sums.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out_features,
        in_features,
        TYPES[x.dtype],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for {rows} x {in_features} int8 activations")
    return out
