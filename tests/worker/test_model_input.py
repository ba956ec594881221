"""Tensors of one forward, out of rows and a plan."""

import pytest
import torch

from fake_gpu import FakeGpu
from octavo.config import EngineConfig
from octavo.protocol import Fork, NewSequence, RowSampling, Slice, StepPlan
from octavo.worker.model_input import _EDIT_BYTES, build_padding, build_step, step_bytes
from octavo.worker.pooling import PoolPart
from octavo.worker.rows import Rows
from octavo.worker.transfers import HOST, GpuTransfers
from octavo_kernels import ops

SAMPLING = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
LAYOUTS = (ops.KVLayout(2, 4, None, torch.device("cpu")),)


def make_rows() -> Rows:
    rows = Rows()
    rows.apply(
        StepPlan(
            step_id=1,
            slices=(Slice(1, 0, 6, 0, (9, 5)), Slice(2, 0, 9, 0, (2, 7, 4))),
            new=(
                NewSequence(1, tuple(range(10, 17)), 7, SAMPLING),
                NewSequence(2, tuple(range(20, 30)), 10, SAMPLING),
            ),
        )
    )
    return rows


def test_a_mixed_batch() -> None:
    rows = make_rows()
    plan = StepPlan(
        step_id=2,
        slices=(Slice(2, 9, 1, samples=(2, 3)), Slice(1, 2, 3)),
        forks=(Fork(2, 3, SAMPLING),),
    )
    rows.apply(plan)
    step = build_step(rows, plan, LAYOUTS)
    inputs, (batch,) = step.inputs, step.inputs.attention
    assert inputs.input_ids.tolist() == [29, 12, 13, 14]
    assert inputs.positions.tolist() == [9, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [4 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 5 * 4]
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [10, 5]
    assert batch.block_tables.tolist() == [[2, 7, 4], [9, 5, 0]]  # as wide as the widest
    assert inputs.sample_rows.tolist() == [0, 0]  # parent and child sample from one row of logits
    assert step.seq_ids == (2, 3)
    assert step.row_to_sequence.tolist() == rows.of([2, 3]).tolist()
    dtypes = (inputs.input_ids, inputs.positions, inputs.sample_rows, batch.slot_mapping)
    assert {tensor.dtype for tensor in dtypes} == {torch.int64}
    assert batch.block_tables.dtype == batch.context_lens.dtype == batch.query_start.dtype == torch.int32


def test_the_rows_of_prompt_logprobs_come_after_those_that_are_sampled_from() -> None:
    asks = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_prompt_logprobs=1)
    rows = Rows()
    plan = StepPlan(
        step_id=1,
        slices=(
            Slice(1, 0, 3, 0, (0,)),
            Slice(2, 0, 2, 0, (1,), (2,)),
            Slice(3, 0, 4, 0, (2,), (3,)),
        ),
        new=(
            NewSequence(1, (10, 11, 12, 13, 14), 5, asks),
            NewSequence(2, (20, 21), 2, SAMPLING),
            NewSequence(3, (30, 31, 32, 33), 3, asks),  # the last token was generated before a preemption
        ),
    )
    rows.apply(plan)
    step = build_step(rows, plan, LAYOUTS)
    assert step.seq_ids == (2, 3)
    assert step.inputs.sample_rows.tolist() == [4, 8, 0, 1, 2, 5, 6]
    assert [(part.seq_id, part.token_ids.tolist()) for part in step.prompt_parts] == [
        (1, [11, 12, 13]),
        (3, [31, 32]),
    ]


def test_a_step_in_which_nobody_samples() -> None:
    rows = make_rows()
    step = build_step(rows, StepPlan(step_id=2, slices=(Slice(1, 0, 6),)), LAYOUTS)
    assert step.inputs.sample_rows.shape == (0,)
    assert step.seq_ids == ()


def test_slots_beyond_32_bits() -> None:
    rows = make_rows()
    plan = StepPlan(step_id=2, slices=(Slice(1, 6, 1, 1, (2**31 - 1,), (1,)),))
    rows.apply(plan)
    (batch,) = build_step(rows, plan, LAYOUTS).inputs.attention
    assert batch.slot_mapping.tolist() == [(2**31 - 1) * 4 + 2]


def test_sampling_before_the_last_token_is_a_bug() -> None:
    rows = make_rows()
    with pytest.raises(AssertionError, match="before the last token"):
        build_step(rows, StepPlan(step_id=2, slices=(Slice(1, 0, 6, samples=(1,)),)), LAYOUTS)


def test_a_decode_step_is_filled_up_with_sequences_that_are_not_there() -> None:
    rows = make_rows()
    plan = StepPlan(step_id=2, slices=(Slice(2, 9, 1, samples=(2,)), Slice(1, 6, 1), Slice(2, 9, 1)))
    transfers = GpuTransfers(FakeGpu(), 10_000)
    step = build_step(rows, plan, LAYOUTS, transfers, decode_sizes=(2, 4, 8))
    inputs, (batch,) = step.inputs, step.inputs.attention
    assert inputs.input_ids.tolist() == [29, 16, 29, 0]
    assert inputs.positions.tolist() == [9, 6, 9, 0]
    assert batch.slot_mapping.tolist() == [17, 22, 17, -1]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4]
    assert batch.context_lens.tolist() == [10, 7, 10, 0]
    assert batch.block_tables.tolist() == [[2, 7, 4], [9, 5, 0], [2, 7, 4], [0, 0, 0]]
    assert inputs.sample_rows.tolist() == [0]
    assert step.seq_ids == (2,)
    again = build_step(
        rows, StepPlan(3, plan.slices[1:2] * 4), LAYOUTS, transfers, decode_sizes=(2, 4, 8)
    ).inputs
    for name in ("slot_mapping", "query_start", "context_lens"):
        one, other = getattr(batch, name), getattr(again.attention[0], name)
        assert one.data_ptr() == other.data_ptr()
    assert again.input_ids.tolist() == inputs.input_ids.tolist() == [16] * 4


def test_other_steps_are_not_filled_up() -> None:
    rows = make_rows()
    mixed = StepPlan(step_id=2, slices=(Slice(2, 9, 1), Slice(1, 2, 3)))
    assert len(build_step(rows, mixed, LAYOUTS, decode_sizes=(8,)).inputs.input_ids) == 4
    many = StepPlan(step_id=2, slices=(Slice(2, 9, 1),) * 9)
    assert len(build_step(rows, many, LAYOUTS, decode_sizes=(1, 8)).inputs.input_ids) == 9


def test_padding_alone_is_what_a_step_is_filled_up_with() -> None:
    inputs = build_padding(3, LAYOUTS, HOST)
    (batch,) = inputs.attention
    assert inputs.input_ids.tolist() == inputs.positions.tolist() == batch.context_lens.tolist() == [0, 0, 0]
    assert batch.slot_mapping.tolist() == [-1, -1, -1]
    assert batch.query_start.tolist() == [0, 1, 2, 3]
    assert batch.block_tables.shape == (3, 1)
    assert len(inputs.sample_rows) == 0


def test_there_is_room_for_the_largest_step() -> None:
    """Of decode, and of prompts, with all that may be asked for; edits have room of their own."""
    asks = RowSampling(0.7, 5, 0.9, 0.1, seed=0, num_logprobs=3, num_prompt_logprobs=1)
    for count, length in ((32, 1), (2, 32)):
        config = EngineConfig(
            "m", max_model_len=200, max_num_seqs=32, max_num_batched_tokens=64, block_size=4
        )
        start, tokens = (199, 200) if length == 1 else (168, 200)
        rows = Rows()
        plan = StepPlan(
            step_id=1,
            slices=tuple(
                Slice(seq, start, length, 0, tuple(range(50)), (seq,) if length == 1 else ())
                for seq in range(count)
            ),
            new=tuple(NewSequence(seq, (1,) * tokens, tokens, asks) for seq in range(count)),
        )
        rows.apply(plan)
        transfers = GpuTransfers(FakeGpu(), step_bytes(config))
        pooled = [PoolPart(0, range(count * length), True)]
        build_step(rows, plan, LAYOUTS, transfers, pooled)
        assert transfers._used <= step_bytes(config) - _EDIT_BYTES
