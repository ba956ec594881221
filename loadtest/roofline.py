"""How long a step takes, from four numbers of a card and the shape of a model; and those four from steps
that were measured.

A step is its linear layers and its attention, one after the other, each as slow as the slower of its
arithmetic and its reading: the roofline model (Williams et al., CACM 2009). To that comes what a step costs
whatever is in it. Used by `simulate.py` and `calibrate.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.models.model_config import ModelConfig
from octavo.protocol import StepPlan

_T = TypeVar("_T", "Card", "ModelShape")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Card:
    """What computes: its rates are those that its kernels reach, not those of a data sheet."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float  # of every step: the host's work, launches
    memory_bytes: int | None = None  # for weights and KV cache; None: not known
    link_bytes_per_s: float | None = None  # to the host's memory, either way; None: not known
    attention_share: float = 1.0  # of both rates, what attention reaches


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's step has to read and to multiply. Mixtures of experts are not covered."""

    parameters: int  # that a token is multiplied with: an embedding counts if the output layer shares it
    output_parameters: int  # of those, the output layer's, where only tokens go that are sampled from
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: float  # of a weight, and of a number in the KV cache

    @classmethod
    def of(cls, config: ModelConfig, dtype_bytes: float) -> "ModelShape":
        """Norms left out, which are nothing beside the products."""
        kv_size = config.num_kv_heads * config.head_size
        attention = 2 * config.hidden_size * (config.num_heads * config.head_size + kv_size)
        mlp = 3 * config.hidden_size * config.intermediate_size
        output = config.vocab_size * config.hidden_size
        return cls(
            config.num_layers * (attention + mlp) + output,
            output,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            dtype_bytes,
        )

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype_bytes


# The data sheets' dense bfloat16 and bandwidth, of which kernels are taken to reach 0.6 and 0.8, and 2 ms a
# step: assumptions, to be replaced by what `calibrate.py` finds where such a card is at hand. So are links of
# 0.8 of PCI Express.
CARDS = {
    "h100": Card(0.6 * 989e12, 0.8 * 3.35e12, 2e-3, 80 * 10**9, 0.8 * 64e9),
    "a100": Card(0.6 * 312e12, 0.8 * 2.04e12, 2e-3, 80 * 10**9, 0.8 * 32e9),
    "l4": Card(0.6 * 121e12, 0.8 * 300e9, 2e-3, 24 * 10**9, 0.8 * 32e9),
    # Of `backend/docs/performance.md`: its products, its memory, and what a step costs beside them.
    "zen4-2-cores": Card(0.42e12, 20e9, 2e-3),
}
SHAPES = {
    "llama-8b": ModelShape(7_504_658_432, 525_336_576, 32, 32, 8, 128, 2),
    "smollm2-135m": ModelShape(134_479_872, 28_311_552, 30, 9, 3, 64, 2),
}


class StepWork(NamedTuple):
    linear_flops: float
    linear_bytes: float
    attention_flops: float
    attention_bytes: float


def work_of(plan: StepPlan, shape: ModelShape) -> StepWork:
    """What a step computes and reads. A slice reads the keys and values before and in it once."""
    num_tokens = num_pairs = num_context = num_sampled = 0
    for _, start, length, _, _, samples in plan.slices:
        num_tokens += length
        num_pairs += length * start + length * (length + 1) // 2  # of a token and one that it attends to
        num_context += start + length
        num_sampled += bool(samples)
    inner = shape.parameters - shape.output_parameters
    outer = shape.output_parameters
    return StepWork(
        2.0 * (inner * num_tokens + outer * num_sampled),
        shape.dtype_bytes * (inner + outer * bool(num_sampled)),
        4.0 * shape.num_layers * shape.num_heads * shape.head_size * num_pairs,
        shape.kv_bytes_per_token * num_context,
    )


def step_s(card: Card, work: StepWork) -> float:
    linear_s = max(work.linear_flops / card.flops_per_s, work.linear_bytes / card.bytes_per_s)
    attention_s = max(work.attention_flops / card.flops_per_s, work.attention_bytes / card.bytes_per_s)
    return card.overhead_s + linear_s + attention_s / card.attention_share


def swap_s(card: Card, plan: StepPlan, block_bytes: float) -> float:
    """How long the plan's blocks take over the link. Raises `ValueError` when that is not known."""
    num_blocks = len(plan.swaps_out) + len(plan.swaps_in)
    if not num_blocks:
        return 0.0
    if card.link_bytes_per_s is None:
        raise ValueError("the card has no 'link_bytes_per_s', and blocks are swapped; set swap_space to 0")
    return num_blocks * block_bytes / card.link_bytes_per_s


def fit(works: Sequence[StepWork], measured_s: Sequence[float]) -> Card:
    """The card whose steps deviate least from those measured, in squares of shares of the measured time: one
    that was interrupted counts as one that is off by its whole length, however long that was.

    Once the ratio of arithmetic to bandwidth is fixed, the rest is linear. So ratios are tried on a grid,
    which is then refined around the best one. Raises `ValueError`.
    """
    if len(works) < 3 or len(works) != len(measured_s) or min(measured_s) <= 0:
        raise ValueError(
            f"{len(works)} steps and {len(measured_s)} times; give a time above 0 for each of 3 and more"
        )
    linear_flops, linear_bytes, attention_flops, attention_bytes = np.array(works, np.float64).T
    times = np.array(measured_s, np.float64)

    def attempt(flops_per_byte: float) -> tuple[float, Floats]:
        """The error, and with it seconds a byte of linear layers, seconds a byte of attention, and seconds a
        step."""
        linear = np.maximum(linear_flops / flops_per_byte, linear_bytes)
        attention = np.maximum(attention_flops / flops_per_byte, attention_bytes)
        return _least_squares((linear, attention, np.ones_like(times)), times)

    low, high = 0.1, 1e4
    for _ in range(6):
        ratios = np.geomspace(low, high, 33)
        best = min(range(len(ratios)), key=lambda index: attempt(float(ratios[index]))[0])
        low, high = ratios[max(best - 1, 0)], ratios[min(best + 1, len(ratios) - 1)]
    ratio = float(ratios[best])
    _, (per_linear_byte, per_attention_byte, overhead_s) = attempt(ratio)
    # Steps that tell nothing of attention leave it at the same rates.
    share = per_linear_byte / per_attention_byte if per_attention_byte > 0 else 1.0
    return Card(ratio / per_linear_byte, 1 / per_linear_byte, overhead_s, attention_share=share)


def _least_squares(amounts: tuple[Floats, ...], times: Floats) -> tuple[float, Floats]:
    """The error relative to the times, and the factors of the amounts that make it least, none below 0: as
    long as one would be, the least but the first is left out."""
    columns = np.stack([amount / times for amount in amounts], axis=1)
    factors = np.zeros(len(amounts))
    used = np.arange(len(amounts))
    found = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    while found.min() < 0:
        used = np.delete(used, 1 + found[1:].argmin())
        found = np.linalg.lstsq(columns[:, used], np.ones(len(times)), rcond=None)[0]
    factors[used] = found
    error = ((columns @ factors - 1) ** 2).sum()
    return float(error), factors


def named(kind: type[_T], name: str) -> _T:
    """A card or a shape by its name here, or from a JSON file with its fields. Raises `ValueError`."""
    known: dict[str, Any] = CARDS if kind is Card else SHAPES
    if name in known:
        found: _T = known[name]
        return found
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"'{name}' is neither a file nor one of {', '.join(known)}")
    values = json.loads(path.read_text())
    names = [field.name for field in fields(kind)]
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{path}: {error}; its fields are {', '.join(names)}") from error
