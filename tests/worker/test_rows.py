"""The worker's rows: plans applied in the order that the protocol gives."""

import numpy as np
import pytest

from octavo.protocol import Choice, Fork, NewSequence, RowSampling, Slice, StepPlan
from octavo.worker.rows import Rows
from octavo.worker.sampler import SampleBatch

SAMPLING = RowSampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7)


def tokens(rows: Rows, seq_id: int) -> list[int]:
    (row,) = rows.of([seq_id])
    return list(rows.token_ids[row, : rows.num_tokens[row]])


def blocks(rows: Rows, seq_id: int, count: int) -> list[int]:
    return list(rows.block_tables[rows.of([seq_id])[0], :count])


def apply(rows: Rows, **parts: object) -> None:
    rows.apply(StepPlan(**{"step_id": 1, "slices": (), **parts}))  # type: ignore[arg-type]


def forbidden(batch: SampleBatch) -> dict[int, tuple[int, ...]]:
    return {index: tuple(edits.forbidden.tolist()) for index, edits in batch.edits.items()}


def new(seq_id: int, *token_ids: int, sampling: RowSampling = SAMPLING) -> NewSequence:
    return NewSequence(seq_id, token_ids, len(token_ids), sampling)


def test_a_row_is_made_grows_and_is_dropped() -> None:
    rows = Rows()
    apply(rows, new=(new(5, 10, 11, 12),), slices=(Slice(5, 0, 3, 0, (8, 9)),))
    assert tokens(rows, 5) == [10, 11, 12]
    assert blocks(rows, 5, 2) == [8, 9]
    rows.append(rows.of([5]), np.array([13]))
    apply(rows, slices=(Slice(5, 3, 1, 1, (20, 21)),))  # a copied block, and an appended one
    assert tokens(rows, 5) == [10, 11, 12, 13]
    assert blocks(rows, 5, 3) == [8, 20, 21]
    apply(rows, finished=(5,))
    assert len(rows) == 0
    with pytest.raises(KeyError):
        rows.of([5])


def test_finished_comes_before_new_so_a_preempted_sequence_may_return_at_once() -> None:
    rows = Rows()
    apply(rows, new=(new(5, 1, 2),))
    apply(rows, finished=(5,), new=(new(5, 1, 2, 3),))
    assert tokens(rows, 5) == [1, 2, 3]


def test_unknown_ids_in_finished_are_fine() -> None:
    rows = Rows()
    apply(rows, finished=(1, 2, 3))
    assert len(rows) == 0


def test_a_child_is_a_copy_that_goes_its_own_way() -> None:
    rows = Rows()
    other = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=8)
    apply(rows, new=(new(1, 4, 5),), slices=(Slice(1, 0, 2, 0, (3,)),), forks=(Fork(1, 2, other),))
    assert tokens(rows, 2) == [4, 5]
    assert blocks(rows, 2, 1) == [3]  # forks see the blocks of this step
    rows.append(rows.of([1, 2]), np.array([6, 7]))
    apply(rows, slices=(Slice(1, 2, 1, 0, (30,)),))
    assert (tokens(rows, 1), tokens(rows, 2)) == ([4, 5, 6], [4, 5, 7])
    assert (blocks(rows, 1, 1), blocks(rows, 2, 1)) == ([30], [3])
    batch = rows.sample_batch(rows.of([2, 1]))
    assert batch.positions.tolist() == [3, 3]
    assert batch.settings["temperature"].tolist() == [0.0, 0.5]
    assert batch.settings["seed"].tolist() == [8, 7]


def test_many_rows_long_sequences_and_reuse() -> None:
    rows = Rows()
    for seq_id in range(100):
        apply(rows, new=(new(seq_id, *range(seq_id, seq_id + 5)),))
    apply(rows, new=(new(100, *range(3000)),), slices=(Slice(100, 0, 3000, 0, tuple(range(188))),))
    apply(rows, finished=tuple(range(0, 100, 2)))
    for seq_id in range(200, 250):
        apply(rows, new=(new(seq_id, seq_id),))
    assert len(rows) == 101
    assert len(set(rows.of([*range(1, 100, 2), 100, *range(200, 250)]).tolist())) == 101
    for seq_id in range(1, 100, 2):
        assert tokens(rows, seq_id) == list(range(seq_id, seq_id + 5))
    assert tokens(rows, 100) == list(range(3000))
    assert blocks(rows, 100, 188) == list(range(188))
    assert tokens(rows, 249) == [249]


def test_a_row_at_full_width_can_be_appended_to() -> None:
    rows = Rows()
    width = rows.token_ids.shape[1]
    apply(rows, new=(new(1, *range(width)),))
    rows.append(rows.of([1]), np.array([77]))
    assert tokens(rows, 1) == [*range(width), 77]


def test_stop_ids_are_forbidden_until_min_tokens_were_generated() -> None:
    rows = Rows()
    sampling = RowSampling(0.0, 0, 1.0, 0.0, seed=0, min_tokens=2, stop_ids=(1, 9))
    apply(rows, new=(new(1, 4, 5, sampling=sampling), new(2, 4)))
    both = rows.of([2, 1])
    for expected in ({1: (1, 9)}, {1: (1, 9)}, {}):
        assert forbidden(rows.sample_batch(both)) == expected
        rows.append(both, np.array([3, 3]))
    resumed = NewSequence(3, (4, 5, 6), 2, sampling)  # after a preemption, with one generated token
    apply(rows, new=(resumed,))
    assert forbidden(rows.sample_batch(rows.of([3]))) == {0: (1, 9)}
    rows.append(rows.of([3]), np.array([3]))
    assert rows.sample_batch(rows.of([3])).edits == {}
    apply(rows, finished=(1, 3), new=(new(4, 4), new(5, 4)))  # into their rows, without their stop ids
    assert rows.sample_batch(rows.of([4, 5])).edits == {}


def test_penalties_count_what_the_row_has_however_it_came_to_it() -> None:
    """Grown token by token, resumed as a whole, forked, or taken over from another row: all the same."""
    sampling = RowSampling(
        0.0, 0, 1.0, 0.0, seed=0, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25
    )
    prompt, output = (7, 8, 7), (8, 9, 9, 30)
    rows = Rows()
    apply(rows, new=(new(1, *prompt, sampling=sampling), new(9, 1)))
    for token in output:
        rows.sample_batch(rows.of([9, 1]))
        rows.append(rows.of([1]), np.array([token]))
    apply(rows, new=(NewSequence(2, prompt + output, 3, sampling),), forks=(Fork(1, 3, sampling),))
    apply(rows, new=(new(4, *prompt, 5, 5, 5, 5, sampling=sampling),))
    rows.sample_batch(rows.of([4]))
    apply(rows, choices=(Choice(4, 1, 30),))
    batch = rows.sample_batch(rows.of([1, 9, 2, 3, 4]))
    assert batch.edits.keys() == {0, 2, 3, 4}
    for edits in batch.edits.values():
        counts = dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True))
        assert counts == {7: 0, 8: 1, 9: 2, 30: 1}
        assert (edits.repetition, edits.frequency, edits.presence) == (1.5, 0.5, 0.25)


def test_prompt_parts_are_the_prompt_tokens_that_follow_those_of_a_slice() -> None:
    rows = Rows()
    asks = RowSampling(0.0, 0, 1.0, 0.0, seed=0, num_prompt_logprobs=2)
    resumed = NewSequence(3, (4, 5, 6, 20, 21), 3, asks)
    apply(rows, new=(new(1, 10, 11, 12, 13, 14, sampling=asks), new(2, 1, 2), resumed))

    def parts(*slices: Slice) -> list[tuple[int, int, int, list[int], int]]:
        return [(*part[:3], part.token_ids.tolist(), part.num_best) for part in rows.prompt_parts(slices)]

    assert parts(Slice(2, 0, 2), Slice(1, 0, 2)) == [(1, 1, 1, [11, 12], 2)]
    assert parts(Slice(1, 2, 2)) == [(1, 0, 3, [13, 14], 2)]
    assert parts(Slice(1, 4, 1), Slice(3, 0, 5)) == [(3, 1, 1, [5, 6], 2)]
    apply(rows, finished=(1, 3))
    assert parts(Slice(2, 0, 2)) == []


def test_choices_replace_the_last_token_and_take_over_another_row_before_it_gets_new_blocks() -> None:
    rows = Rows()
    apply(rows, new=(new(1, 10, 11), new(2, 20), new(3, 30, 31)), slices=(Slice(1, 0, 2, 0, (5, 6)),))
    rows.append(rows.of([1, 2, 3]), np.array([12, 21, 32]))
    choices = (Choice(1, 1, 50), Choice(2, 1, 51), Choice(3, 3, 52))
    apply(rows, choices=choices, slices=(Slice(1, 2, 1, 1, (7,)), Slice(2, 2, 1, 2, (8,))))
    assert tokens(rows, 1) == [10, 11, 50]
    assert tokens(rows, 2) == [10, 11, 51]
    assert tokens(rows, 3) == [30, 31, 52]
    assert blocks(rows, 1, 2) == [5, 7]
    assert blocks(rows, 2, 3) == [5, 6, 8]
