"""Reference of `ops.rope`; see there for shapes."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    # Rotating by half the head puts each number's partner in its place; the sign is in `sin`.
    partner = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos[:, None], partner, sin[:, None]).to(x.dtype)
