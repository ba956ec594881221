"""Runs a model over its KV cache: block copies, forward, and the next tokens."""

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.config import EngineConfig
from octavo.layers.inputs import ModelInput
from octavo.models.decoder import Decoder
from octavo.protocol import BlockCopy, NewSequence, PromptLogprobs, RowSampling, Slice, StepPlan
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_step
from octavo.worker.prompt_logprobs import PromptPart, prompt_logprobs
from octavo.worker.rows import Rows
from octavo.worker.sampler import SampleBatch, Samples, sample


class ModelRunner:
    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies whole blocks of all layers. Every source is read before any destination is written."""
        if copies:
            self._cache.copy([c.source for c in copies], [c.destination for c in copies])

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
