"""`ops.silu_and_mul` and `ops.gelu_and_mul` in the Triton language; see `ops` for shapes."""

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.gpu.compiled import Form

_BLOCK = 1024  # of a row: with four warps, one 16-byte load of the gate and one of the other for each thread
_WARPS = 4


@triton.jit
def _activate_kernel(p_gate_up, p_out, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_number < size
    p_gate = p_gate_up + row * 2 * size + o_number
    gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(p_gate + size, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # 0.5 (1 + tanh(z)) is the logistic function of 2 z
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = tl.sigmoid(gate)
    tl.store(p_out + row * size + o_number, (gate * share * up).to(p_out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _activate(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _activate(gate_up, gelu=True)


def _activate(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        _activate_kernel[rows, triton.cdiv(size, _BLOCK)](
            gate_up, out, size, BLOCK=_BLOCK, GELU=gelu, num_warps=_WARPS
        )
    return out


def forms(capability: int) -> list[Form]:
    types = {"p_gate_up": "*bf16:16", "p_out": "*bf16:16", "size": "i32:16"}
    return [
        Form(name, _activate_kernel, types, {"BLOCK": _BLOCK, "GELU": gelu}, _WARPS, stages=1)
        for name, gelu in (("silu_and_mul bfloat16", False), ("gelu_and_mul bfloat16", True))
    ]
