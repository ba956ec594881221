"""Reference of `ops.quantise_int8` and `ops.linear_int8`; see there for shapes.

The products of integers are summed in float32: exactly, since a group's sums are below 2^24.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128  # columns of activations that share a scale


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [..., K]: int8 of the same shape, and scales [...]."""
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(most > 0, 127.0 / most, 0.0)
    rounded = torch.where(wide.isfinite().all(dim=-1, keepdim=True), (wide * factor).round(), 0.0)
    return rounded.to(torch.int8), torch.where(most.isfinite(), most / 127.0, torch.nan)[..., 0]


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    padding = (0, -x.shape[1] % GROUP)
    rounded, x_scales = quantise(F.pad(x, padding).view(len(x), -1, GROUP))
    by_group = F.pad(weight, padding).view(len(weight), -1, GROUP).permute(1, 2, 0)  # [G, GROUP, N]
    sums = torch.bmm(rounded.transpose(0, 1).float(), by_group.float())  # [G, T, N]
    product = (sums * x_scales.T[..., None]).sum(dim=0) * scales
    return (product if bias is None else product + bias).to(x.dtype)
