"""Log-probabilities of prompt tokens: what each token of a prompt was expected to be after those before it.

A step computes them for the slices of prompts that ask. `worker.rows` says which tokens those are,
`worker.model_input` keeps the hidden states that precede them, and the executor asks for the values. On the
engine's thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import PromptLogprobs
from octavo.worker.sampler import Head, logprobs_of

# A long prompt has more rows of logits than there is memory for. With so many the head is at full speed.
_ROWS_AT_ONCE = 64


class PromptPart(NamedTuple):
    """Consecutive prompt tokens, each of which follows a token of one slice: the first follows its first."""

    seq_id: int
    slice_index: int  # in the plan
    position: int  # of the first, in its sequence
    token_ids: NDArray[np.int64]
    num_best: int


def prompt_logprobs(head: Head, hidden: Tensor, parts: Sequence[PromptPart]) -> tuple[PromptLogprobs, ...]:
    """`hidden` [P, H]: the states before all the tokens of all parts, end to end."""
    results = []
    begin = 0
    for part in parts:
        entries = []
        for first in range(0, len(part.token_ids), _ROWS_AT_ONCE):
            token_ids = part.token_ids[first : first + _ROWS_AT_ONCE]
            logits = head.logits(hidden[begin + first : begin + first + len(token_ids)])
            entries += logprobs_of(logits, token_ids, np.full(len(token_ids), part.num_best))
        results.append(PromptLogprobs(part.seq_id, part.position, tuple(entries)))
        begin += len(part.token_ids)
    return tuple(results)
