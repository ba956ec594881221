"""Native `ops.silu_and_mul`; see there for shapes."""

import ctypes

from torch import Tensor

from octavo_kernels.cpu.library import TYPES, num_threads


def takes(gate_up: Tensor) -> bool:
    return gate_up.is_contiguous()


def silu_and_mul(lib: ctypes.CDLL, gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    out = gate_up.new_empty((rows, width // 2))
    lib.octavo_silu_and_mul(
        gate_up.data_ptr(), out.data_ptr(), rows, width // 2, TYPES[gate_up.dtype], num_threads()
    )
    return out
