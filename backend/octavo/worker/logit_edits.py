"""What a sequence's parameters do to its logits before a token is chosen: bias, penalties, tokens ruled out.

A row that has such parameters has `RowEdits`, which `worker.rows` keeps and asks for the next token's
`LogitEdits`; `worker.sampler` applies those of a batch. A batch in which no row has any costs nothing. On the
engine's thread.

All is a function of the row's tokens: a sequence that resumes after a preemption, or a child that was forked
off, begins anew and reads them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
        """For the token that follows `token_ids`; None where there is nothing to edit. To be applied before
        this is called again."""
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


def edited(logits: Tensor, edits: Mapping[int, LogitEdits]) -> Tensor:
    """A copy in float32 of `logits` [R, V], edited; `edits` by index in [0, R), at least one."""
    result = logits.to(torch.float32, copy=True)
    _add_biases(result, edits)
    _penalise(result, edits)
    _keep_allowed(result, edits)
    _forbid(result, edits)
    return result


def _add_biases(logits: Tensor, edits: Mapping[int, LogitEdits]) -> None:
    rows, columns, biases = _entries(logits, {i: (edit.biased, edit.biases) for i, edit in edits.items()})
    if len(rows):
        logits[rows, columns] += biases


def _penalise(logits: Tensor, edits: Mapping[int, LogitEdits]) -> None:
    rows, columns, counts = _entries(logits, {i: (edit.seen, edit.counts) for i, edit in edits.items()})
    if not len(rows):
        return
    scales = [(edit.repetition, edit.frequency, edit.presence) for edit in edits.values()]
    lengths = [len(edit.seen) for edit in edits.values()]
    table = torch.from_numpy(np.repeat(np.array(scales, np.float32), lengths, axis=0)).to(logits.device)
    repetition, frequency, presence = table.unbind(1)
    values = logits[rows, columns]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, columns] = values - frequency * counts - presence * (counts > 0)


def _keep_allowed(logits: Tensor, edits: Mapping[int, LogitEdits]) -> None:
    allowed = {index: edit.allowed for index, edit in edits.items() if edit.allowed is not None}
    if not allowed:
        return
    rows, columns, _ = _entries(logits, {index: (ids, _NO_VALUES) for index, ids in allowed.items()})
    kept = logits[rows, columns]
    logits[list(allowed)] = -torch.inf
    logits[rows, columns] = kept


def _forbid(logits: Tensor, edits: Mapping[int, LogitEdits]) -> None:
    size = logits.shape[-1]
    below = {index: (edit.forbidden[edit.forbidden < size], _NO_VALUES) for index, edit in edits.items()}
    rows, columns, _ = _entries(logits, below)
    if len(rows):
        logits[rows, columns] = -torch.inf


def _entries(
    logits: Tensor, by_row: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns and values of several rows, end to end: rows [E], columns [E], and the values."""
    columns = [columns for columns, _ in by_row.values()]
    rows = np.repeat(np.fromiter(by_row, np.int64, len(by_row)), [len(part) for part in columns])
    values = [values for _, values in by_row.values()]
    parts = rows, np.concatenate(columns), np.concatenate(values)
    where, which, what = (torch.from_numpy(part).to(logits.device) for part in parts)
    return where, which, what


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
