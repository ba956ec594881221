"""Log-probabilities of prompt tokens: what each token of a prompt was expected to be after those before it.

A step computes them for the slices of prompts that ask. `worker.rows` says which tokens those are,
`worker.model_input` keeps the hidden states that precede them and sends the tokens, and the executor asks for
the values. On the engine's thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import PromptLogprobs
from octavo.worker.sampler import Head, logprobs_of, token_logprobs
from octavo.worker.transfers import Transfers

# A long prompt has more rows of logits than there is memory for. With so many the head is at full speed.
_ROWS_AT_ONCE = 64
_KINDS = 5  # of tensors that `ops.token_logprobs` returns


class PromptPart(NamedTuple):
    """Consecutive prompt tokens, each of which follows a token of one slice: the first follows its first."""

    seq_id: int
    slice_index: int  # in the plan
    position: int  # of the first, in its sequence
    token_ids: NDArray[np.int64]
    num_best: int


def prompt_logprobs(
    head: Head, hidden: Tensor, token_ids: Tensor, parts: Sequence[PromptPart], transfers: Transfers
) -> tuple[PromptLogprobs, ...]:
    """`hidden` [P, H]: the states before all the tokens of all parts, end to end; `token_ids` [P]: those
    tokens, on the device. Waits for it once a part."""
    results = []
    begin = 0
    for part in parts:
        count = len(part.token_ids)
        counts = np.full(count, part.num_best)
        columns: list[Tensor] = []
        for first in range(begin, begin + count, _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, begin + count))
            columns += token_logprobs(head.logits(hidden[rows]), token_ids[rows], counts)
        read = transfers.read(columns)
        joined = [np.concatenate(read[kind::_KINDS]) for kind in range(_KINDS)]
        entries = logprobs_of(part.token_ids, counts, joined)
        results.append(PromptLogprobs(part.seq_id, part.position, tuple(entries)))
        begin += count
    return tuple(results)
