"""Native `ops.linear_int8` and, for its weights, `ops.linear_best`; see there for shapes."""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels import host_memory
from octavo_kernels.cpu.library import TYPES, num_threads

_PANEL = 32  # as linear.h has it


def takes(lib: ctypes.CDLL, weight: Tensor) -> bool:
    return hasattr(lib, "octavo_linear_int8") and weight.is_contiguous() and weight.shape[1] % 4 == 0


def pack(lib: ctypes.CDLL, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The packed weight, 128 more than it is (vpdpbusd wants one side unsigned), and its rows' scales,
    padded to whole panels."""
    weight = weight.view(torch.uint8).bitwise_xor(128)
    rows, columns = weight.shape
    padding = -rows % _PANEL
    packed = host_memory.lasting(((rows + padding) * columns,), weight.dtype, weight.device)
    lib.octavo_pack_linear(weight.data_ptr(), packed.data_ptr(), rows, columns, 2)
    return packed, F.pad(scales, (0, padding))


def linear(
    lib: ctypes.CDLL, x: Tensor, parts: tuple[Tensor, Tensor], out_features: int, bias: Tensor | None
) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    packed, scales = parts
    rows, in_features = x.shape
    out = x.new_empty((rows, out_features))
    failed = lib.octavo_linear_int8(
        x.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out_features,
        in_features,
        TYPES[x.dtype],
        num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for {rows} x {in_features} int8 activations")
    return out


def best(
    lib: ctypes.CDLL, x: Tensor, parts: tuple[Tensor, Tensor], out_features: int, count: int
) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        x = x.contiguous()
    packed, scales = parts
    rows, in_features = x.shape
    ids = x.new_empty((rows, count), dtype=torch.int64)
    values = x.new_empty((rows, count), dtype=torch.float32)
    failed = lib.octavo_linear_int8_best(
        x.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        values.data_ptr(),
        ids.data_ptr(),
        count,
        rows,
        out_features,
        in_features,
        TYPES[x.dtype],
        num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for {rows} x {in_features} int8 activations, or for the best outputs")
    return ids, values
