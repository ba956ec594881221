"""How a linear layer stores and multiplies its weight.

A `Scheme` makes a `Weight` for every linear layer; the layer knows nothing else of number formats. The
checkpoint's tensors go straight into the views that `Weight.destinations` hands out; `finish_loading` then
turns what was loaded into what is multiplied.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.quant import packing
from octavo_kernels import host_memory, ops


class Weight(Protocol):
    """One linear layer's weight, of `out_features` rows and `in_features` columns."""

    def destinations(self, first_row: int, num_rows: int) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint must fill for some of the rows: its name within the layer ("weight") and a view,
        in the layout the checkpoint has it in. Only before `finish_loading`."""

    def finish_loading(self) -> None:
        """Called once, when all destinations are filled."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`. `x` [T, in_features]; `bias` [out_features]. Returns [T, out_features]."""

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest of each row of `multiply(x, None)`, as `ops.linear_best` returns them: ids and
        values, [T, count]."""

    def fused(self, bias: Tensor | None) -> ops.Product | None:
        """`multiply` for `ops.fuse_layers`; None where that cannot have it. Only after `finish_loading`."""


class Scheme(Protocol):
    def make_weight(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """An unfilled weight. `dtype` is the activations'."""

    def weight_of(self, matrix: Tensor) -> Weight:
        """A weight of the same numbers, ready to be multiplied. `matrix` [out_features, in_features] is of
        the activations' type, and stays as it is."""

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """What a weight takes once it is loaded, but for rows that packing may add: up to 31."""

    def num_copied_bytes(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """What `weight_of` takes beside the matrix, just so."""


class DenseWeight:
    """Every number of it, in the activations' type; on a CPU packed for the matrix product, if it can be: for
    our own kernel, else for oneDNN's."""

    def __init__(self, matrix: Tensor) -> None:
        """`matrix` [out_features, in_features], filled or not yet."""
        self._weight = matrix
        self._packed: ops.PackedLinear | None = None
        self._is_reordered = False

    def destinations(self, first_row: int, num_rows: int) -> Iterator[tuple[str, Tensor]]:
        assert self._packed is None
        assert not self._is_reordered
        yield "weight", self._weight[first_row : first_row + num_rows]

    def finish_loading(self) -> None:
        self._packed = ops.pack_linear(self._weight)
        if self._packed is not None:
            self._weight = self._weight.new_empty(0)
        elif packing.can_pack(self._weight):
            self._weight, self._is_reordered = packing.pack(self._weight), True

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            return ops.linear(x, self._packed, bias)
        if self._is_reordered:
            return packing.multiply(x, self._weight, bias)
        return F.linear(x, self._weight, bias)

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if self._packed is not None:
            return ops.linear_best(x, self._packed, count)
        return ops.best_logits(self.multiply(x, None), count)

    def fused(self, bias: Tensor | None) -> ops.Product | None:
        return None if self._packed is None else ops.fused_product(self._packed, bias)


class Unquantised:
    """The scheme of a checkpoint without quantisation (or one that its reader undoes, as with GGUF)."""

    def make_weight(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        return DenseWeight(host_memory.empty((out_features, in_features), dtype, device))

    def weight_of(self, matrix: Tensor) -> Weight:
        weight = DenseWeight(matrix)
        weight.finish_loading()
        return weight

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize

    def num_copied_bytes(
        self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        packs = ops.packs_linear(dtype, device) or packing.packs(dtype, device)
        return self.num_bytes(out_features, in_features, dtype) if packs else 0
