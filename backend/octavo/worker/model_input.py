"""From a step plan and the worker's rows to the tensors of one forward, without a loop over tokens.

All arrays of a step go to the device together (`worker.transfers`), what the sampler needs among them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import EngineConfig
from octavo.layers.inputs import AttentionInput, ModelInput
from octavo.protocol import StepPlan
from octavo.worker.pooling import PoolPart, rows_of
from octavo.worker.prompt_logprobs import PromptPart
from octavo.worker.rows import Rows
from octavo.worker.sampler import SampleInput, send
from octavo.worker.transfers import HOST, Transfers
from octavo_kernels import ops

_EDIT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """One forward's tensors, and whom its R rows of logits are for: several may be for one row of logits.

    `inputs.sample_rows` [R + P + E] are those that are sampled from, those of prompts' log-probabilities, and
    those that are pooled.
    """

    inputs: ModelInput
    seq_ids: tuple[int, ...]  # [R]
    row_to_sequence: NDArray[np.int64]  # [R] the worker's row that samples from it; all different
    sampling: SampleInput  # of the R rows
    prompt_parts: Sequence[PromptPart] = ()  # whose P rows of logits follow those R
    prompt_ids: Tensor | None = None  # [P] the tokens of all parts, end to end; None without any


def build_step(
    rows: Rows,
    plan: StepPlan,
    layouts: Sequence[ops.KVLayout],
    transfers: Transfers = HOST,
    pool_parts: Sequence[PoolPart] = (),
    decode_sizes: Sequence[int] = (),
) -> Step:
    """The plan must have been applied to the rows. `layouts`: the KV cache's, by KV group. Where every slice
    is one token, S is filled up to the next of `decode_sizes`, which rise, with sequences that are not there:
    they store nothing, and nobody samples from them."""
    block_size = layouts[0].block_size
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
    input_ids = rows.token_ids[token_owners, positions].astype(np.int64)

    seq_ids = tuple(chain.from_iterable(samples))
    per_slice = np.fromiter(map(len, samples), np.int64, count)
    sampled = owners if seq_ids == slice_ids else rows.of(seq_ids)
    assert (rows.num_tokens[owners] == context_lens)[per_slice > 0].all(), "sampling before the last token"
    sample_rows = [np.repeat(query_start[1:] - 1, per_slice)]
    prompt_parts = rows.prompt_parts(plan.slices)
    sample_rows += [query_start[part.slice_index] + np.arange(len(part.token_ids)) for part in prompt_parts]
    if pool_parts:
        sample_rows.append(rows_of(pool_parts))

    if decode_sizes and count == query_start[-1] <= decode_sizes[-1]:
        size = decode_sizes[bisect_left(decode_sizes, count)]
        input_ids, positions = _filled(input_ids, size, 0), _filled(positions, size, 0)
        slot_mapping, context_lens = _filled(slot_mapping, size, -1), _filled(context_lens, size, 0)
        block_tables, query_start = _filled(block_tables, size, 0), np.arange(size + 1)

    transfers.begin()
    inputs = _add(
        transfers,
        layouts,
        input_ids,
        positions,
        slot_mapping,
        query_start,
        context_lens,
        block_tables,
        _joined(sample_rows),
    )
    prompt_ids = transfers.add(_joined([part.token_ids for part in prompt_parts])) if prompt_parts else None
    sampling = send(rows.sample_batch(sampled), transfers.add)
    transfers.send()
    return Step(inputs, seq_ids, sampled, sampling, prompt_parts, prompt_ids)


def build_padding(size: int, layouts: Sequence[ops.KVLayout], transfers: Transfers) -> ModelInput:
    """A decode step of `size` sequences that are not there, as `build_step` fills up with."""
    zeros = np.zeros(size, np.int64)
    tables = np.zeros((size, 1), np.int32)
    transfers.begin()
    inputs = _add(transfers, layouts, zeros, zeros, zeros - 1, np.arange(size + 1), zeros, tables, zeros[:0])
    transfers.send()
    return inputs


def step_bytes(config: EngineConfig) -> int:
    """That the arrays of any step take, and some more for edits of logits."""
    assert config.max_model_len is not None
    tokens, sequences = config.token_budget, config.max_num_seqs
    blocks = -(-config.max_model_len // config.block_size)
    of_tokens = 3 * 8 + 3 * 8  # the forward's; rows to sample, to pool, and of a prompt with its token
    of_sequences = 4 + 4 + 4 * blocks + 8 + 64  # the forward's, its row to sample, and the sampler's
    return tokens * of_tokens + sequences * of_sequences + _EDIT_BYTES


def _add(
    transfers: Transfers,
    layouts: Sequence[ops.KVLayout],
    input_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    slot_mapping: NDArray[np.int64],
    query_start: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    sample_rows: NDArray[np.int64],
) -> ModelInput:
    """Block tables, as wide as the step's widest, come behind all whose size T and S decide."""
    add = transfers.add
    ids, where, slots = add(input_ids), add(positions), add(slot_mapping)
    starts, contexts = add(query_start.astype(np.int32)), add(context_lens.astype(np.int32))
    tables = add(block_tables)
    attention = tuple(
        AttentionInput(
            slot_mapping=slots,
            query_start=starts,
            context_lens=contexts,
            block_tables=tables,
            plan=ops.plan_batch(layout, block_tables, context_lens, query_start, slot_mapping),
        )
        for layout in layouts
    )
    return ModelInput(ids, where, attention, add(sample_rows))


def _filled(array: NDArray[Any], size: int, value: int) -> NDArray[Any]:
    missing = np.full((size - len(array), *array.shape[1:]), value, array.dtype)
    return np.concatenate((array, missing)) if len(missing) else array


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
