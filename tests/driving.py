"""Drives a model by hand: step plans without a scheduler, logits instead of sampled tokens.

Block ids are handed out in random order from a cache full of NaN, so whatever reads a slot it should not
read shows.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from octavo.models.decoder import Decoder
from octavo.models.model_config import ModelConfig
from octavo.protocol import BlockCopy, Fork, NewSequence, RowSampling, Slice, StepPlan
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_step
from octavo.worker.model_runner import ModelRunner
from octavo.worker.rows import Rows

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass
class DrivenSequence:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    shares_last_block: bool = False


class Driver:
    """`new`, `fork` and `compute` write down a step; `step` runs it. `dtype` is the KV cache's."""

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 400,
    ) -> None:
        self.block_size = block_size
        cache = KVCache(config, num_blocks, block_size, dtype, torch.device("cpu"))
        for layer in cache.layers:
            layer.k.view(torch.uint8).fill_(255)  # a NaN of every type, or a scale that is one
            layer.v.view(torch.uint8).fill_(255)
        self._layouts = cache.layouts
        self._model = model
        self._runner = ModelRunner(model, cache)
        self._rows = Rows()
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self.sequences: dict[int, DrivenSequence] = {}
        self._plan = StepPlan(step_id=1, slices=())

    def new(self, seq_id: int, token_ids: Iterable[int], prefix_of: int | None = None, hit: int = 0) -> None:
        """A sequence. The blocks of its first `hit` tokens, full ones, may be another's (a prefix hit)."""
        sequence = DrivenSequence(list(token_ids), num_computed=hit)
        if prefix_of is not None:
            sequence.block_table = self.sequences[prefix_of].block_table[: hit // self.block_size]
        self.sequences[seq_id] = sequence
        added = NewSequence(seq_id, tuple(sequence.token_ids), len(sequence.token_ids), GREEDY)
        self._plan = replace(self._plan, new=(*self._plan.new, added))

    def finish(self, seq_id: int) -> None:
        """Its blocks go back, with what is in them, to be used by others next."""
        self._free.extend(reversed(self.sequences.pop(seq_id).block_table))
        self._plan = replace(self._plan, finished=(*self._plan.finished, seq_id))

    def compute(self, seq_id: int, count: int | None = None, children: Iterable[int] = ()) -> None:
        """The next `count` tokens of a sequence, or all; it samples, with new children, after its last."""
        sequence = self.sequences[seq_id]
        start = sequence.num_computed
        end = len(sequence.token_ids) if count is None else start + count
        known = tuple(sequence.block_table) if any(n.seq_id == seq_id for n in self._plan.new) else ()
        first_block = len(sequence.block_table) - len(known)
        copies = self._plan.copies
        if sequence.shares_last_block and start % self.block_size:
            shared, own = sequence.block_table[-1], self._free.pop()
            copies = (*copies, BlockCopy(shared, own))
            sequence.block_table[-1] = own
            first_block -= 1
        sequence.shares_last_block = False
        while len(sequence.block_table) * self.block_size < end:
            sequence.block_table.append(self._free.pop())
        blocks = tuple(sequence.block_table[first_block:])
        sequence.num_computed = end
        samples: tuple[int, ...] = ()
        forks = self._plan.forks
        if end == len(sequence.token_ids):
            samples = (seq_id, *children)
            for child in children:
                # Whoever writes first copies; the last child is left alone with the block.
                self.sequences[child] = DrivenSequence(
                    list(sequence.token_ids), list(sequence.block_table), end, child != samples[-1]
                )
                sequence.shares_last_block = True
                forks = (*forks, Fork(seq_id, child, GREEDY))
        piece = Slice(seq_id, start, end - start, first_block, blocks, samples)
        self._plan = replace(self._plan, slices=(*self._plan.slices, piece), copies=copies, forks=forks)

    def step(self) -> dict[int, Tensor]:
        """Runs what was written down. Returns the logits [V] of every sequence that samples, and appends
        its argmax to it."""
        plan, self._plan = self._plan, StepPlan(step_id=self._plan.step_id + 1, slices=())
        with torch.inference_mode():
            self._rows.apply(plan)
            self._runner.copy_blocks(plan.copies)
            step = build_step(self._rows, plan, self._layouts)
            logits = self._model.logits(self._runner.run(step.inputs))
        token_ids = logits.argmax(dim=-1).numpy().astype(np.int64)
        self._rows.append(step.row_to_sequence, token_ids)
        for seq_id, token_id in zip(step.seq_ids, token_ids.tolist(), strict=True):
            self.sequences[seq_id].token_ids.append(token_id)
        return dict(zip(step.seq_ids, logits, strict=True))
