"""Runs a model over its KV cache: swaps, block copies, forward, and the next tokens."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.config import EngineConfig
from octavo.layers.inputs import ModelInput
from octavo.models.decoder import Decoder
from octavo.protocol import BlockCopy, NewSequence, PromptLogprobs, RowSampling, Slice, StepPlan, Swap
from octavo.worker.host_pool import HostPool
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_step
from octavo.worker.prompt_logprobs import PromptPart, prompt_logprobs
from octavo.worker.rows import Rows
from octavo.worker.sampler import SampleBatch, Samples, sample


class ModelRunner:
    def __init__(self, model: Decoder, cache: KVCache, host: HostPool | None = None) -> None:
        self._model = model
        self._cache = cache
        self._host = host

    def move_blocks(self, plan: StepPlan) -> float:
        """The plan's swaps and copies of blocks, in the order that `protocol.py` gives. Returns how many
        seconds the swaps took."""
        swap_s = 0.0
        if plan.swaps_out:
            swap_s += self._timed(HostPool.swap_out, plan.swaps_out)
        self.copy_blocks(plan.copies)
        if plan.swaps_in:
            swap_s += self._timed(HostPool.swap_in, plan.swaps_in)
        return swap_s

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks of all layers. Every source is read before any destination is written."""
        if copies:
            self._cache.copy([c.source for c in copies], [c.destination for c in copies])

    def _timed(self, swap: Callable[[HostPool, Sequence[Swap]], None], swaps: Sequence[Swap]) -> float:
        assert self._host is not None, "a plan swaps, but there are no host blocks"
        begin = time.perf_counter()
        swap(self._host, swaps)
        self._host.wait()
        return time.perf_counter() - begin

    def run(self, inputs: ModelInput) -> Tensor:
        """Writes the batch's K and V; returns the hidden states [R + P, H] of `inputs.sample_rows`."""
        return self._model.forward(inputs, self._cache.layers).index_select(0, inputs.sample_rows)

    def sample(self, hidden: Tensor, batch: SampleBatch) -> Samples:
        """The tokens that follow `hidden` [R, H]."""
        return sample(self._model, hidden, batch)

    def prompt_logprobs(self, hidden: Tensor, parts: Sequence[PromptPart]) -> tuple[PromptLogprobs, ...]:
        """Of the prompt tokens that follow `hidden` [P, H]."""
        return prompt_logprobs(self._model, hidden, parts)


def run_largest_step(model: Decoder, make_cache: Callable[[int], KVCache], config: EngineConfig) -> None:
    """Takes as much memory as any step will, and gives it back: all the tokens and all the sequences that the
    configuration lets into one, each sampled at random from edited logits. They share the blocks of a small
    cache."""
    assert config.max_model_len is not None
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // count, config.max_model_len)
    blocks = tuple(range(-(-length // config.block_size)))
    sampling = RowSampling(
        temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0, num_logprobs=1, repetition_penalty=1.1
    )
    plan = StepPlan(
        step_id=0,
        slices=tuple(Slice(seq, 0, length, 0, blocks, (seq,)) for seq in range(count)),
        new=tuple(NewSequence(seq, (0,) * length, length, sampling) for seq in range(count)),
    )
    cache = make_cache(len(blocks))
    rows = Rows()
    rows.apply(plan)
    step = build_step(rows, plan, cache.layouts)
    runner = ModelRunner(model, cache)
    runner.sample(runner.run(step.inputs), rows.sample_batch(step.row_to_sequence))
