"""The rows that the worker keeps, one a sequence: tokens, block table, sampling parameters.

NumPy arrays that only ever grow, so that a step's inputs are a few indexing operations whatever the number of
sequences. Changed by step plans, in the order that `protocol.py` gives, and by the tokens sampled since.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.protocol import Choice, NewSequence, RowSampling, Slice, StepPlan
from octavo.worker.logit_edits import RowEdits
from octavo.worker.prompt_logprobs import PromptPart
from octavo.worker.sampler import SETTINGS, SampleBatch, settings_of

_FIRST_ROWS = 16
_FIRST_TOKENS = 256
_FIRST_BLOCKS = 16


class Rows:
    """Row numbers are reused; a sequence keeps its row from `new` or `forks` until `finished`."""

    def __init__(self) -> None:
        self.token_ids: NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_TOKENS), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(_FIRST_ROWS, np.int64)
        self.block_tables: NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int32)
        self._num_prompt_tokens: NDArray[np.int64] = np.zeros(_FIRST_ROWS, np.int64)
        self._settings: NDArray[np.void] = np.zeros(_FIRST_ROWS, SETTINGS)
        self._edits: dict[int, RowEdits] = {}  # by row, where there are any
        self._prompt_logprobs: dict[int, int] = {}  # by row, where they are wanted: of how many of the best
        self._row_of: dict[int, int] = {}  # by sequence
        self._free: list[int] = list(range(_FIRST_ROWS))

    def __len__(self) -> int:
        return len(self._row_of)

    def of(self, seq_ids: Sequence[int]) -> NDArray[np.int64]:
        """The rows of sequences. A sequence that has none is a bug of the scheduler: `KeyError`."""
        return np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))

    def apply(self, plan: StepPlan) -> None:
        """Everything in the plan that concerns rows."""
        for seq_id in plan.finished:
            self._drop(seq_id)
        for sequence in plan.new:
            self._add(sequence)
        if plan.choices:
            self._choose(plan.choices)
        for piece in plan.slices:
            if piece.block_ids:
                self._set_blocks(self._row_of[piece.seq_id], piece.first_block, piece.block_ids)
        for fork in plan.forks:
            parent, child = self._row_of[fork.parent_id], self._take(fork.child_id, fork.sampling)
            self._copy(parent, child)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One token to each of the rows, which are all different."""
        if not len(rows):
            return
        ends = self.num_tokens[rows]
        self._widen_tokens(int(ends.max()) + 1)
        self.token_ids[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1

    def sample_batch(self, rows: NDArray[np.int64]) -> SampleBatch:
        """What the sampler needs to know of the rows that it samples the next token for."""
        edits = {}
        for index, row in enumerate(rows.tolist() if self._edits else ()):
            if row in self._edits:
                token_ids = self.token_ids[row, : self.num_tokens[row]]
                edit = self._edits[row].next(token_ids, int(self._num_prompt_tokens[row]))
                if edit is not None:
                    edits[index] = edit
        return SampleBatch(self._settings[rows], self.num_tokens[rows], edits)

    def prompt_parts(self, slices: Sequence[Slice]) -> list[PromptPart]:
        """The prompt tokens that follow a token of the slices, where their log-probabilities are wanted."""
        parts = []
        for index, piece in enumerate(slices if self._prompt_logprobs else ()):
            row = self._row_of[piece.seq_id]
            first, end = piece.start + 1, piece.start + piece.length + 1
            end = min(end, int(self._num_prompt_tokens[row]))
            if row in self._prompt_logprobs and first < end:
                token_ids = self.token_ids[row, first:end].astype(np.int64)
                parts.append(PromptPart(piece.seq_id, index, first, token_ids, self._prompt_logprobs[row]))
        return parts

    def _take(self, seq_id: int, sampling: RowSampling) -> int:
        assert seq_id not in self._row_of, f"sequence {seq_id} has a row already"
        if not self._free:
            self._double_rows()
        row = self._free.pop()
        self._row_of[seq_id] = row
        self._settings[row] = settings_of(sampling)
        if RowEdits.wanted(sampling):
            self._edits[row] = RowEdits(sampling)
        if sampling.num_prompt_logprobs is not None:
            self._prompt_logprobs[row] = sampling.num_prompt_logprobs
        return row

    def _drop(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id, None)
        if row is not None:  # a sequence of a failed step may never have had one
            self._edits.pop(row, None)
            self._prompt_logprobs.pop(row, None)
            self._free.append(row)

    def _add(self, sequence: NewSequence) -> None:
        row = self._take(sequence.seq_id, sequence.sampling)
        count = len(sequence.token_ids)
        self._widen_tokens(count)
        self.token_ids[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self._num_prompt_tokens[row] = sequence.num_prompt_tokens

    def _copy(self, parent: int, child: int) -> None:
        for column in (self.token_ids, self.num_tokens, self.block_tables, self._num_prompt_tokens):
            column[child] = column[parent]
        if child in self._edits:
            self._edits[child].begin_anew()

    def _choose(self, choices: Sequence[Choice]) -> None:
        rows = self.of([choice.seq_id for choice in choices])
        for row, choice in zip(rows.tolist(), choices, strict=True):
            if choice.seq_id != choice.parent_id:
                self._copy(self._row_of[choice.parent_id], row)
        self.token_ids[rows, self.num_tokens[rows] - 1] = [choice.token_id for choice in choices]

    def _set_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        end = first + len(block_ids)
        if end > self.block_tables.shape[1]:
            self.block_tables = _widened(self.block_tables, end)
        self.block_tables[row, first:end] = block_ids

    def _widen_tokens(self, count: int) -> None:
        if count > self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, count)

    def _double_rows(self) -> None:
        count = len(self.num_tokens)
        self._free = list(range(count, 2 * count))
        self.token_ids = _doubled(self.token_ids)
        self.num_tokens = _doubled(self.num_tokens)
        self.block_tables = _doubled(self.block_tables)
        self._num_prompt_tokens = _doubled(self._num_prompt_tokens)
        self._settings = _doubled(self._settings)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((array, np.zeros_like(array)))


def _widened(array: NDArray[np.int32], columns: int) -> NDArray[np.int32]:
    """At least twice as wide, so that growing one column at a time stays cheap."""
    wider = np.zeros((len(array), max(columns, 2 * array.shape[1])), np.int32)
    wider[:, : array.shape[1]] = array
    return wider
