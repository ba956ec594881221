"""Native `ops.pack_linear`, `ops.linear` and `ops.linear_best`; see there for shapes."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels import host_memory
from octavo_kernels.cpu.library import TYPES, library, num_threads

_PANEL = 32  # as linear.c has it


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the order that the kernel reads it in, and the library that it was packed with."""

    lib: ctypes.CDLL
    packed: Tensor
    out_features: int
    in_features: int


def serves(dtype: torch.dtype) -> bool:
    """Whether products of this type run here, not in torch."""
    lib = library()
    return dtype in TYPES and lib is not None and hasattr(lib, "octavo_linear")


def takes(lib: ctypes.CDLL, weight: Tensor) -> bool:
    # Without vdpbf16ps a product is compiled out: oneDNN's is the better one there.
    return hasattr(lib, "octavo_linear") and weight.is_contiguous() and weight.shape[1] % 2 == 0


def pack(lib: ctypes.CDLL, weight: Tensor) -> PackedLinear:
    rows, columns = weight.shape
    packed = host_memory.lasting((-(-rows // _PANEL) * _PANEL * columns,), weight.dtype, weight.device)
    lib.octavo_pack_linear(weight.data_ptr(), packed.data_ptr(), rows, columns, TYPES[weight.dtype])
    return PackedLinear(lib, packed, rows, columns)


def multiply(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    assert x.dtype == weight.packed.dtype
    assert x.shape[-1] == weight.in_features
    rows = x.shape[0]
    out = x.new_empty((rows, weight.out_features))
    weight.lib.octavo_linear(
        x.data_ptr(),
        weight.packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.out_features,
        weight.in_features,
        TYPES[x.dtype],
        num_threads(),
    )
    return out


def best(x: Tensor, weight: PackedLinear, count: int) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        x = x.contiguous()
    assert x.dtype == weight.packed.dtype
    assert x.shape[-1] == weight.in_features
    rows = x.shape[0]
    ids = x.new_empty((rows, count), dtype=torch.int64)
    values = x.new_empty((rows, count), dtype=torch.float32)
    failed = weight.lib.octavo_linear_best(
        x.data_ptr(),
        weight.packed.data_ptr(),
        values.data_ptr(),
        ids.data_ptr(),
        count,
        rows,
        weight.out_features,
        weight.in_features,
        TYPES[x.dtype],
        num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the best outputs of each part of a product")
    return ids, values
