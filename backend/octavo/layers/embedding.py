"""The token embedding, which a model with tied weights also uses as its output head."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from octavo.layers.linear import Placement
from octavo.quant.base import Weight


class Embedding:
    """A vector for every token of the vocabulary, and, backwards, a logit for every token."""

    def __init__(self, vocab_size: int, hidden_size: int, name: str, placement: Placement) -> None:
        self._weight = placement.empty(vocab_size, hidden_size)  # [V, H]
        self._scheme = placement.scheme
        self._head: Weight | None = None
        self._name = name

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [T] integers. Returns [T, H]."""
        return F.embedding(token_ids, self._weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, H]. Returns [R, V]. Only after `become_head`."""
        assert self._head is not None
        return self._head.multiply(hidden, None)

    def best(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits of each row, as `ops.linear_best` has them. Only after `become_head`."""
        assert self._head is not None
        return self._head.best(hidden, count)

    def become_head(self) -> None:
        """Makes what `logits` multiplies by, stored as a linear layer's weight is: often a second copy.

        Called once the weight is loaded, and only where `logits` will be.
        """
        self._head = self._scheme.weight_of(self._weight)

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self._weight
