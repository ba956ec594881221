"""Native `ops.rms_norm` and `ops.add_rms_norm`; see there for shapes."""

import ctypes

import torch
from torch import Tensor

from octavo_kernels.cpu.library import TYPES, num_threads


def rms_norm(lib: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = torch.empty_like(x)
    _call(lib, x, None, weight, norm, None, eps)
    return norm


def add_rms_norm(
    lib: ctypes.CDLL, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    norm, total = torch.empty_like(x), torch.empty_like(x)
    _call(lib, x, residual, weight, norm, total, eps)
    return norm, total


def takes(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    if not (x.is_contiguous() and x.dtype == weight.dtype and weight.is_contiguous()):
        return False
    return residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)


def _call(
    lib: ctypes.CDLL,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    norm: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    lib.octavo_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        norm.data_ptr(),
        None if total is None else total.data_ptr(),
        x.numel() // size,
        size,
        eps,
        TYPES[x.dtype],
        num_threads(),
    )
