"""Rotary position embeddings: the frequencies, scaled for long contexts, and the angles of a step's tokens.

Frequencies are [D / 2] float32, computed once. Cosines and sines are computed once a step, for the positions
of its tokens only, and shared by all layers.
"""

import math

import torch
from torch import Tensor


def frequencies(head_size: int, theta: float) -> Tensor:
    """`theta ** (-2 i / D)` (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / theta**exponents


def llama3_frequencies(
    base: Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_positions: int
) -> Tensor:
    """Divides by `factor` what turns less than `low_freq_factor` times over the original context, keeps what
    turns more than `high_freq_factor` times, and interpolates between (Llama 3.1)."""
    turns = original_max_positions * base / (2 * math.pi)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return torch.lerp(base / factor, base, kept.clamp(0.0, 1.0))


def yarn_frequencies(
    base: Tensor,
    theta: float,
    factor: float,
    original_max_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """Divides by `factor` from the pair on that turns `beta_slow` times over the original context, keeps what
    comes before the one that turns `beta_fast` times, with a linear ramp between (YaRN, arXiv 2309.00071).

    `truncate` rounds the two ends of the ramp outwards to whole pairs.
    """
    half = len(base)

    def pair_that_turns(times: float) -> float:
        return half * math.log(original_max_positions / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low)
    return torch.lerp(base, base / factor, ramp.clamp(0.0, 1.0))


class RotaryEmbedding:
    """The angles of positions. `attention_factor` multiplies cosines and sines (YaRN's temperature)."""

    def __init__(self, inv_freq: Tensor, attention_factor: float, device: torch.device) -> None:
        self._inv_freq = inv_freq.to(device)
        self._attention_factor = attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` [T] integers. Returns `cos` and `sin` [T, D] float32, as `ops.rope` takes them."""
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
