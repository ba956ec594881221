"""The shared object with the native kernels that fits this CPU: chosen, compiled if need be, loaded once.

The environment variable OCTAVO_KERNELS forces `reference`, `avx2`, `avx512` or `amx`.
"""

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from octavo_kernels.cpu import build

log = logging.getLogger("octavo")

# Element types, as the C side numbers them.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
_CACHE_TYPES = {torch.int8: 2, torch.float8_e4m3fn: 3}  # beside the tensors' own

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "octavo_start": (_I, []),
    "octavo_rms_norm": (None, [_P] * 5 + [_I] * 2 + [_F] + [_I] * 2),
    "octavo_silu_and_mul": (None, [_P] * 2 + [_I] * 4),
    "octavo_rope_store": (None, [_P] * 6 + [_I] * 8),
    "octavo_paged_attention": (_I, [_P] * 7 + [_I] * 9 + [_F] * 2 + [_I] * 3),
    "octavo_best_token": (None, [_P] * 3 + [_I] * 4),
    "octavo_sample": (_I, [_P] * 7 + [_I] * 5),
    "octavo_token_logprobs": (_I, [_P] * 7 + [_I] * 6),
    "octavo_decoder_layers": (_I, [_P, _P, _I, _P]),
    "octavo_pack_linear": (None, [_P] * 2 + [_I] * 3),
    "octavo_linear": (None, [_P] * 4 + [_I] * 5),
    "octavo_linear_best": (_I, [_P] * 4 + [_I] * 6),
    "octavo_linear_int8": (_I, [_P] * 5 + [_I] * 5),
    "octavo_linear_int8_best": (_I, [_P] * 5 + [_I] * 6),
}


def cache_type(cache: Tensor, dtype: torch.dtype) -> int | None:
    """The number of a KV cache's element type, if kernels that compute in `dtype` read and write it."""
    return TYPES[dtype] if cache.dtype == dtype else _CACHE_TYPES.get(cache.dtype)


class _Threads:
    """How many threads a kernel runs on: as many as torch, unless it was said otherwise."""

    count: int | None = None


def num_threads() -> int:
    return _Threads.count or torch.get_num_threads()


def set_num_threads(count: int | None) -> None:
    """Of the whole process, as torch's is. None: torch's."""
    _Threads.count = count


def native(x: Tensor) -> ctypes.CDLL | None:
    """The library, if `x` is a tensor that it computes with."""
    return library() if x.is_cpu and x.dtype in TYPES else None


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where the reference serves instead: it was asked for, or (said once, loudly) nothing else can.
    A lesser instruction set serves where a better one of this CPU cannot be had; that is said too."""
    forced = os.environ.get("OCTAVO_KERNELS")
    if forced == "reference":
        return None
    try:
        name, loaded, refusals = _best(forced)
    except build.BuildError as error:
        log.warning("CPU kernels run as the slow torch reference: %s", error)
        return None
    if refusals:
        log.warning("CPU kernels: %s; better ones could not be had: %s", name, "; ".join(refusals))
    else:
        log.info("CPU kernels: %s", name)
    return loaded


def load(path: Path) -> ctypes.CDLL:
    """Raises `OSError` when it is no shared object of this system, or may not use what it is compiled for."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            continue  # of another instruction set, or the products, without those that make them worth having
        function.restype, function.argtypes = result, arguments
    if hasattr(loaded, "octavo_start") and (refusal := loaded.octavo_start()):
        raise OSError(f"the system does not let this process use AMX ({os.strerror(refusal)})")
    return loaded


def supported() -> list[str]:
    """The instruction sets that this CPU has, best first."""
    return [name for name, needed in build.CPU_FLAGS.items() if needed <= _cpu_flags()]


def _best(forced: str | None) -> tuple[str, ctypes.CDLL, list[str]]:
    """The best instruction set that can be had, its library, and why none of the better ones. Raises
    `BuildError`."""
    known = supported()
    if forced is not None and forced not in known:
        allowed = ", ".join(["reference", *known])
        raise build.BuildError(f"OCTAVO_KERNELS is '{forced}'; on this CPU it may be: {allowed}")
    if not known:
        raise build.BuildError(f"there are none for this CPU ({platform.machine()}): AVX2 is the least")
    refusals: list[str] = []
    for name in known if forced is None else [forced]:
        try:
            return name, load(build.build(name)), refusals
        except (build.BuildError, OSError) as error:
            refusals.append(str(error))
    raise build.BuildError("; ".join(dict.fromkeys(refusals)))


def _cpu_flags(lines: Iterable[str] | None = None) -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text().splitlines() if lines is None else lines
    except OSError:
        return frozenset()
    flags = next((line for line in text if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
