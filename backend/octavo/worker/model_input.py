"""From a step plan and the worker's rows to the tensors of one forward, without a loop over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.layers.inputs import AttentionInput, ModelInput
from octavo.protocol import StepPlan
from octavo.worker.prompt_logprobs import PromptPart
from octavo.worker.rows import Rows
from octavo_kernels import ops


@dataclass(frozen=True, slots=True)
class Step:
    """One forward's tensors, and whom its R rows of logits are for: several may be for one row of logits.

    `inputs.sample_rows` [R + P] are those that are sampled from, then those of prompts' log-probabilities.
    """

    inputs: ModelInput
    seq_ids: tuple[int, ...]  # [R]
    row_to_sequence: NDArray[np.int64]  # [R] the worker's row that samples from it; all different
    prompt_parts: Sequence[PromptPart] = ()  # whose P rows of logits follow those R


def build_step(rows: Rows, plan: StepPlan, layouts: Sequence[ops.KVLayout]) -> Step:
    """The plan must have been applied to the rows. `layouts`: the KV cache's, by KV group."""
    device, block_size = layouts[0].device, layouts[0].block_size
    count = len(plan.slices)
    slice_ids, first_tokens, num_tokens, _, _, samples = zip(*plan.slices, strict=True)
    owners = rows.of(slice_ids)  # [S]
    starts = np.array(first_tokens, np.int64)
    lengths = np.array(num_tokens, np.int64)
    context_lens = starts + lengths
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])

    token_owners = np.repeat(owners, lengths)  # [T]
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    blocks, offsets = np.divmod(positions, block_size)
    slot_mapping = rows.block_tables[token_owners, blocks].astype(np.int64) * block_size + offsets
    widest = -(-int(context_lens.max()) // block_size)
    block_tables = rows.block_tables[owners, :widest]

    seq_ids = tuple(chain.from_iterable(samples))
    per_slice = np.fromiter(map(len, samples), np.int64, count)
    sampled = owners if seq_ids == slice_ids else rows.of(seq_ids)
    assert (rows.num_tokens[owners] == context_lens)[per_slice > 0].all(), "sampling before the last token"
    sample_rows = np.repeat(query_start[1:] - 1, per_slice)
    prompt_parts = rows.prompt_parts(plan.slices)
    for part in prompt_parts:
        before = query_start[part.slice_index] + np.arange(len(part.token_ids))
        sample_rows = np.concatenate((sample_rows, before))

    def tensor(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    attention = tuple(
        AttentionInput(
            slot_mapping=tensor(slot_mapping),
            query_start=tensor(query_start.astype(np.int32)),
            context_lens=tensor(context_lens.astype(np.int32)),
            block_tables=tensor(block_tables),
            plan=ops.plan_batch(layout, block_tables, context_lens, query_start, slot_mapping),
        )
        for layout in layouts
    )
    inputs = ModelInput(
        input_ids=tensor(rows.token_ids[token_owners, positions].astype(np.int64)),
        positions=tensor(positions),
        attention=attention,
        sample_rows=tensor(sample_rows),
    )
    return Step(inputs, seq_ids, sampled, prompt_parts)
