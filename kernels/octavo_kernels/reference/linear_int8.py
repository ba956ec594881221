"""Reference of `ops.quantise_int8` and `ops.linear_int8`; see there for shapes.

The products of integers are summed in float32: exactly, up to sums of 2^24.
"""

import torch
from torch import Tensor


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(most > 0, 127.0 / most, 0.0)
    rounded = torch.where(wide.isfinite().all(dim=-1, keepdim=True), (wide * factor).round(), 0.0)
    return rounded.to(torch.int8), torch.where(most.isfinite(), most / 127.0, torch.nan)[..., 0]


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    rounded, x_scales = quantise(x)
    product = rounded.float() @ weight.float().T * (x_scales[:, None] * scales)
    return (product if bias is None else product + bias).to(x.dtype)
