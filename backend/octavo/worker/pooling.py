"""From the hidden states of a prompt to one vector. Owned by the executor, on the engine's thread.

A prompt may come in chunks, so what has been seen of it is kept between steps, in float64: the vector is the
same however the prompt was cut. Normalising and shortening it is the engine's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import PooledPrompt, Slice, StepPlan
from octavo.request import Pooling


@dataclass(slots=True)
class _Prompt:
    pooling: Pooling
    num_tokens: int
    num_seen_tokens: int = 0
    total: Tensor | None = None  # [H] float64: of the hidden states seen, for their mean


class PoolPart(NamedTuple):
    """Rows of one step's T tokens that go into one prompt's vector."""

    seq_id: int
    rows: range
    ends: bool  # with these the prompt is complete


class Pooler:
    """`apply` and `parts` for every plan, then `pool` with the hidden states of `rows_of` the parts."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}  # by sequence

    def apply(self, plan: StepPlan) -> None:
        for seq_id in plan.finished if self._prompts else ():
            self._prompts.pop(seq_id, None)
        for new in plan.new:
            if new.pooling is not None:
                self._prompts[new.seq_id] = _Prompt(new.pooling, len(new.token_ids))

    def parts(self, slices: Sequence[Slice]) -> list[PoolPart]:
        """Which of the step's hidden states are needed."""
        parts = []
        first = 0
        for piece in slices if self._prompts else ():
            end = first + piece.length
            prompt = self._prompts.get(piece.seq_id)
            if prompt is not None:
                ends = piece.start + piece.length == prompt.num_tokens
                if prompt.pooling == "mean":
                    parts.append(PoolPart(piece.seq_id, range(first, end), ends))
                elif ends:
                    parts.append(PoolPart(piece.seq_id, range(end - 1, end), ends))
            first = end
        return parts

    def pool(self, hidden: Tensor, parts: Sequence[PoolPart]) -> tuple[PooledPrompt, ...]:
        """The last E of `hidden` [.., H] are the states of all rows of all parts, end to end. Returns those
        that ended."""
        pooled = []
        begin = len(hidden) - sum(len(part.rows) for part in parts)
        for part in parts:
            prompt = self._prompts[part.seq_id]
            end = begin + len(part.rows)
            total = hidden[begin:end].sum(0, dtype=torch.float64)
            prompt.total = total if prompt.total is None else prompt.total + total
            prompt.num_seen_tokens += len(part.rows)
            begin = end
            if part.ends:
                vector = tuple((prompt.total / prompt.num_seen_tokens).tolist())
                pooled.append(PooledPrompt(part.seq_id, vector))
        return tuple(pooled)


def rows_of(parts: Sequence[PoolPart]) -> NDArray[np.int64]:
    """All rows of all parts, end to end: [E]."""
    return np.array([row for part in parts for row in part.rows], np.int64)
