"""The token embedding, which a model with tied weights also uses as its output head."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from octavo.layers.linear import Placement
from octavo_kernels import ops


class Embedding:
    """A vector for every token of the vocabulary, and, backwards, a logit for every token."""

    def __init__(self, vocab_size: int, hidden_size: int, name: str, placement: Placement) -> None:
        self._weight = placement.empty(vocab_size, hidden_size)  # [V, H]
        self._packed: ops.PackedLinear | None = None
        self._name = name

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [T] integers. Returns [T, H]."""
        return F.embedding(token_ids, self._weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, H]. Returns [R, V]."""
        if self._packed is not None:
            return ops.linear(hidden, self._packed)
        return F.linear(hidden, self._weight)

    def pack_for_logits(self) -> None:
        """Keeps a second copy, in the order that the product reads it in. Called once the weight is loaded,
        and only where `logits` will be."""
        self._packed = ops.pack_linear(self._weight)

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self._weight
