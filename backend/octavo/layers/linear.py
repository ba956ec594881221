"""Linear layers, fused where several read the same input, and cut along a tensor-parallel shard.

A layer is given the Hugging Face names of what it fuses, in order, and maps them to views of its parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quant.base import Scheme
from octavo_kernels import host_memory, ops


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of `size` equal parts of every layer this process has."""

    rank: int = 0
    size: int = 1

    def part_of(self, count: int, name: str) -> int:
        """`count / size`. Raises `ConfigError` when `count` heads or columns cannot be divided evenly."""
        if count % self.size:
            raise ConfigError(f"'tensor_parallel_size' is {self.size}; it must divide {name}, {count}")
        return count // self.size


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Placement:
    """What every layer is built with: how weights are stored, of which type, where, and which part."""

    scheme: Scheme
    dtype: torch.dtype
    device: torch.device
    shard: Shard = WHOLE

    def empty(self, *shape: int) -> Tensor:
        return host_memory.empty(shape, self.dtype, self.device)


class Linear:
    """`x @ weight.T + bias` for the outputs of several checkpoint layers, one after the other."""

    def __init__(
        self, in_features: int, out_features: Mapping[str, int], bias: bool, placement: Placement
    ) -> None:
        """`out_features`: rows by the name of the checkpoint's layer. All sizes are this shard's."""
        self._out_features = dict(out_features)
        total = sum(out_features.values())
        self._weight = placement.scheme.make_weight(total, in_features, placement.dtype, placement.device)
        self._bias = placement.empty(total) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, in_features]. Returns [T, sum of out_features]."""
        return self._weight.multiply(x, self._bias)

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest outputs of each row: ids and values [T, count], as `ops.linear_best` has them.
        Only without a bias."""
        assert self._bias is None
        return self._weight.best(x, count)

    def fused(self) -> ops.Product | None:
        """This layer for `ops.fuse_layers`; None where that cannot have it. Only after `finish_loading`."""
        return self._weight.fused(self._bias)

    def finish_loading(self) -> None:
        self._weight.finish_loading()

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        first = 0
        for name, rows in self._out_features.items():
            for suffix, view in self._weight.destinations(first, rows):
                yield f"{name}.{suffix}", view
            if self._bias is not None:
                yield f"{name}.bias", self._bias[first : first + rows]
            first += rows


def column_linear(
    in_features: int, out_features: Mapping[str, int], bias: bool, placement: Placement
) -> Linear:
    """Each shard has some of every layer's outputs. `out_features`: whole sizes by name."""
    parts = {
        name: placement.shard.part_of(rows, f"the outputs of {name}") for name, rows in out_features.items()
    }
    return Linear(in_features, parts, bias, placement)


def row_linear(in_features: int, out_features: int, name: str, bias: bool, placement: Placement) -> Linear:
    """Each shard has some of the inputs, and its output is a summand; the first shard's carries the bias."""
    part = placement.shard.part_of(in_features, f"the inputs of {name}")
    return Linear(part, {name: out_features}, bias and placement.shard.rank == 0, placement)
