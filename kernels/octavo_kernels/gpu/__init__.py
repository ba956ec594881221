"""Kernels in the Triton language, for NVIDIA GPUs of compute capability 8.0 and newer.

This module imports no triton, so that an installation for a CPU needs none; the others are imported when they
are first asked for. With TRITON_INTERPRET=1 in the environment when Python starts, they serve tensors
on a CPU as well, through Triton's interpreter: thousands of times slower, and right where they are right on a
GPU. OCTAVO_KERNELS=reference forces the torch reference, here as on a CPU.
"""

import functools
import importlib
import importlib.util
import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo_kernels.gpu import activation, block_copy, kv_store, paged_attention, rms_norm, sampling

__all__ = [
    "activation",
    "block_copy",
    "kv_store",
    "paged_attention",
    "rms_norm",
    "sampling",
    "serves",
]

log = logging.getLogger("octavo")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEAST_CAPABILITY = (8, 0)
_CPU = -1  # the index of the device of a CPU's tensor


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def serves(x: Tensor) -> bool:
    """Whether these kernels compute with `x`."""
    if x.is_cuda or (INTERPRETED and x.is_cpu):
        return _serve(x.get_device())
    return False


@functools.cache
def _serve(device: int) -> bool:
    """Where they could not but should, that is said once, loudly: the reference gives the same, only
    slower."""
    if os.environ.get("OCTAVO_KERNELS") == "reference":
        return False
    if importlib.util.find_spec("triton") is None:
        log.warning("GPU kernels run as the slow torch reference: the package 'triton' is not installed")
        return False
    if device == _CPU:
        return True
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        log.warning(
            "GPU kernels run as the slow torch reference: %s has compute capability %d.%d, less than %d.%d",
            torch.cuda.get_device_name(device),
            *capability,
            *LEAST_CAPABILITY,
        )
        return False
    obstacle = _obstacle()
    if obstacle is not None:
        log.warning(
            "GPU kernels run as the slow torch reference: Triton cannot build what launches them, for which "
            "it needs a C compiler and Python's headers: %s",
            obstacle,
        )
        return False
    return True


def _obstacle() -> str | None:
    """Why Triton can launch nothing on a GPU, if it cannot: its driver is C, and is built when first asked
    for, as are the launchers of kernels."""
    try:
        _ = importlib.import_module("triton.runtime").driver.active
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
