"""What a sequence's parameters do to its logits before a token is chosen: bias, penalties, tokens ruled out.

A row that has such parameters has `RowEdits`, which `worker.rows` keeps and asks for the next token's
`LogitEdits`; `worker.sampler` sends those of a batch to the device and applies them there. A batch in which
no row has any costs nothing. On the engine's thread.

All is a function of the row's tokens: a sequence that resumes after a preemption, or a child that was forked
off, begins anew and reads them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import RowSampling

_FIRST_TOKENS = 64
_NO_IDS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.float32)


class LogitEdits(NamedTuple):
    """What one row of logits undergoes, from the first field to the last. No field names a token twice.

    The logits of tokens seen so far are divided by `repetition`, or multiplied where they are negative (CTRL,
    Keskar et al., arXiv 1909.05858); then `frequency` for each time that a token was generated, and
    `presence` if it was at all, are taken off (OpenAI's definition).
    """

    biased: NDArray[np.int64] = _NO_IDS
    biases: NDArray[np.float32] = _NO_VALUES  # as long as `biased`
    seen: NDArray[np.int64] = _NO_IDS
    counts: NDArray[np.float32] = _NO_VALUES  # as long as `seen`: how often each was generated
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    allowed: NDArray[np.int64] | None = None  # None: all
    forbidden: NDArray[np.int64] = _NO_IDS  # ids above the vocabulary are fine


class RowEdits:
    """Of one row, which only gets longer until it begins anew."""

    def __init__(self, sampling: RowSampling) -> None:
        self._sampling = sampling
        self._biased = _ids(token for token, _ in sampling.logit_bias)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._stop_ids = _ids(sampling.stop_ids)
        self._allowed = None if sampling.allowed_ids is None else np.unique(_ids(sampling.allowed_ids))
        self._bad_words = _BadWords(sampling.bad_words)
        self._penalises = _penalises(sampling)
        self.begin_anew()

    @staticmethod
    def wanted(sampling: RowSampling) -> bool:
        """Whether a row with these parameters needs any."""
        return bool(
            _penalises(sampling)
            or sampling.logit_bias
            or sampling.allowed_ids is not None
            or sampling.bad_words
            or (sampling.min_tokens and sampling.stop_ids)
        )

    def begin_anew(self) -> None:
        """The row has other tokens now."""
        self._seen = _SeenTokens(with_prompt=self._sampling.repetition_penalty != 1)

    def next(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> LogitEdits | None:
        """For the token that follows `token_ids`; None where there is nothing to edit. To be sent before this
        is called again."""
        sampling = self._sampling
        generated = token_ids[num_prompt_tokens:]
        forbidden = self._bad_words.after(generated)
        if len(generated) < sampling.min_tokens:
            forbidden = np.union1d(forbidden, self._stop_ids)
        seen, counts = _NO_IDS, _NO_VALUES
        if self._penalises:
            seen, counts = self._seen.read(token_ids, num_prompt_tokens)
        if not (len(seen) or len(forbidden) or len(self._biased) or self._allowed is not None):
            return None
        return LogitEdits(
            biased=self._biased,
            biases=self._biases,
            seen=seen,
            counts=counts,
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            allowed=self._allowed,
            forbidden=forbidden,
        )


class Entries(NamedTuple):
    """Some of the logits [R, V], and a number for each, if that is needed."""

    rows: Tensor  # [E] int64
    columns: Tensor  # [E] int64
    values: Tensor  # [E] float32, or empty


class BatchEdits(NamedTuple):
    """The `LogitEdits` of a batch on the device; None where no row has any of a kind."""

    biased: Entries | None
    seen: Entries | None  # with `counts`
    penalties: Tensor | None  # [3, E] float32, for each of the seen: repetition, frequency, presence
    allowed: Entries | None
    restricted: Tensor | None  # [A] int64: the rows in which nothing but `allowed` is
    forbidden: Entries | None


def to_device(edits: Mapping[int, LogitEdits], add: Callable[[NDArray[Any]], Tensor]) -> BatchEdits:
    """`edits` by index in [0, R); `add` is that of `Transfers`."""

    def entries(parts: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Entries | None:
        lengths = [len(columns) for columns, _ in parts.values()]
        if not sum(lengths):
            return None
        rows = np.repeat(np.fromiter(parts, np.int64, len(parts)), lengths)
        columns, values = (np.concatenate(part) for part in zip(*parts.values(), strict=True))
        return Entries(add(rows), add(columns), add(values))

    seen = entries({index: (edit.seen, edit.counts) for index, edit in edits.items()})
    penalties = None
    if seen is not None:
        each = np.array([(e.repetition, e.frequency, e.presence) for e in edits.values()], np.float32)
        penalties = add(np.repeat(each.T, [len(edit.seen) for edit in edits.values()], axis=1))
    allowed = {i: (edit.allowed, _NO_VALUES) for i, edit in edits.items() if edit.allowed is not None}
    return BatchEdits(
        biased=entries({index: (edit.biased, edit.biases) for index, edit in edits.items()}),
        seen=seen,
        penalties=penalties,
        allowed=entries(allowed),
        restricted=add(np.array(list(allowed))) if allowed else None,
        forbidden=entries({index: (edit.forbidden, _NO_VALUES) for index, edit in edits.items()}),
    )


def edited(logits: Tensor, edits: BatchEdits) -> Tensor:
    """A copy in float32 of `logits` [R, V], edited. Waits for nothing."""
    result = logits.to(torch.float32, copy=True)
    if edits.biased is not None:
        rows, columns, biases = edits.biased
        result[rows, columns] += biases
    if edits.seen is not None and edits.penalties is not None:
        _penalise(result, edits.seen, edits.penalties)
    if edits.restricted is not None:
        _keep_allowed(result, edits.restricted, edits.allowed)
    if edits.forbidden is not None:
        _forbid(result, edits.forbidden)
    return result


def _penalise(logits: Tensor, seen: Entries, penalties: Tensor) -> None:
    rows, columns, counts = seen
    repetition, frequency, presence = penalties
    values = logits[rows, columns]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, columns] = values - frequency * counts - presence * (counts > 0)


def _keep_allowed(logits: Tensor, restricted: Tensor, allowed: Entries | None) -> None:
    if allowed is None:
        logits.index_fill_(0, restricted, -torch.inf)
        return
    kept = logits[allowed.rows, allowed.columns]
    logits.index_fill_(0, restricted, -torch.inf)
    logits[allowed.rows, allowed.columns] = kept


def _forbid(logits: Tensor, forbidden: Entries) -> None:
    """Ids above the vocabulary become plus infinity at its end, which a minimum passes over: to leave them
    out would take a look at them, and that a wait."""
    size = logits.shape[-1]
    places = forbidden.rows * size + forbidden.columns.clamp(max=size - 1)
    values = torch.where(forbidden.columns < size, -torch.inf, torch.inf)
    logits.view(-1).scatter_reduce_(0, places, values, "amin")


class _SeenTokens:
    """The distinct tokens of a row, and how often each was generated. Reads every token once."""

    def __init__(self, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._places: dict[int, int] = {}  # by token, in the two arrays
        self._ids = np.empty(_FIRST_TOKENS, np.int64)
        self._counts = np.zeros(_FIRST_TOKENS, np.float32)
        self._num_read = 0

    def read(
        self, token_ids: NDArray[np.int32], num_prompt_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Takes up what is new of all tokens of the row. The next call changes what this one returns."""
        first = self._num_read if self._with_prompt else max(self._num_read, num_prompt_tokens)
        for position, token in enumerate(token_ids[first:].tolist(), first):
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._counts[place] += position >= num_prompt_tokens
        self._num_read = len(token_ids)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]


class _BadWords:
    """Sequences of tokens that must not be generated: the last of one is forbidden after all the others."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        last: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            last.setdefault(word[:-1], set()).add(word[-1])
        self._always = _ids(sorted(last.pop((), ())))
        self._last = {begin: _ids(sorted(ends)) for begin, ends in last.items()}
        self._lengths = sorted({len(begin) for begin in last})

    def after(self, generated: NDArray[np.int32]) -> NDArray[np.int64]:
        """What cannot follow the tokens generated so far."""
        forbidden = self._always
        for length in self._lengths:
            if length <= len(generated):
                ends = self._last.get(tuple(generated[len(generated) - length :].tolist()))
                if ends is not None:
                    forbidden = np.union1d(forbidden, ends)
        return forbidden


def _penalises(sampling: RowSampling) -> bool:
    return (
        sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    )


def _ids(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64)
