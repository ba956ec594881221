"""`ops.rms_norm` and `ops.add_rms_norm` in the Triton language; see `ops` for shapes.

A program has one row, all of it in registers: what is read is read once, and the sum with the residual is
written on the way to its norm.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.gpu.compiled import Form

_THREAD_NUMBERS = 16  # of a row: two 16-byte loads, which a thread has under way at once
_MOST_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_norm,
    p_sum,
    size,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    o_number = tl.arange(0, BLOCK)
    mask = o_number < size
    x = tl.load(p_x + row + o_number, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(p_residual + row + o_number, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(p_sum.dtype.element_ty)  # as it is stored
        tl.store(p_sum + row + o_number, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(p_weight + o_number, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_norm + row + o_number, (x * scale * weight).to(p_norm.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = x.new_empty(x.shape)
    _launch(x, None, weight, norm, None, eps)
    return norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    norm, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, norm, total, eps)
    return norm, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Tensor, total: Tensor | None, eps: float
) -> None:
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            norm,
            total,
            size,
            eps,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=_warps(block),
        )


def _warps(block: int) -> int:
    return min(max(block // (32 * _THREAD_NUMBERS), 1), _MOST_WARPS)


def forms(capability: int) -> list[Form]:
    tensors = dict.fromkeys(("p_x", "p_residual", "p_weight", "p_norm", "p_sum"), "*bf16:16")
    types = {**tensors, "size": "i32:16", "eps": "fp32"}
    found = []
    for size in (576, 4096, 8192):
        block = triton.next_power_of_2(size)
        constants = {"BLOCK": block, "HAS_RESIDUAL": True}
        label = f"add_rms_norm bfloat16 {size}"
        found.append(Form(label, _rms_norm_kernel, types, constants, _warps(block), stages=1))
    constants = {"BLOCK": 4096, "HAS_RESIDUAL": False, "p_residual": None, "p_sum": None}
    label = "rms_norm bfloat16 4096"
    found.append(Form(label, _rms_norm_kernel, types, constants, _warps(4096), stages=1))
    return found
