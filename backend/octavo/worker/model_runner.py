"""Runs a model over its KV cache: swaps, block copies, forward, and the next tokens."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from octavo.config import EngineConfig
from octavo.layers.inputs import ModelInput
from octavo.models.decoder import Decoder
from octavo.protocol import BlockCopy, NewSequence, PromptLogprobs, RowSampling, Slice, StepPlan, Swap
from octavo.worker.cuda_graphs import DecodeGraphs, decode_sizes
from octavo.worker.gpu import Gpu
from octavo.worker.host_pool import HostPool
from octavo.worker.kv_cache import KVCache
from octavo.worker.logit_edits import LogitEdits
from octavo.worker.model_input import Step, build_padding, build_step, step_bytes
from octavo.worker.pooling import PoolPart
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.rows import Rows
from octavo.worker.sampler import SETTINGS, Drawn, SampleBatch, Samples, draw, read, send, settings_of
from octavo.worker.transfers import HOST, GpuTransfers, Transfers

# Greedy, at random, and with log-probabilities.
_USUAL = (
    RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
    RowSampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.0, seed=0),
    RowSampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0, num_logprobs=1),
)
# All graphs against the largest, whose memory they share: a bound that no card has confirmed (ADR 11).
_GRAPH_FACTOR = 2


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        host: HostPool | None = None,
        transfers: Transfers = HOST,
    ) -> None:
        self._model = model
        self._cache = cache
        self._host = host
        self._transfers = transfers
        self._graphs: DecodeGraphs | None = None

    def use_graphs(self, gpu: Gpu, config: EngineConfig) -> None:
        """From now on decode steps run as CUDA graphs, where that is wanted and can be. Two are made here:
        the largest, in whose memory the others find room, and the smallest, in which attention splits keys
        among programs, so that what does is compiled."""
        sizes = decode_sizes(config)
        if not sizes or not gpu.can_capture:
            return
        assert config.max_model_len is not None
        model, caches, layouts = self._model, self._cache.layers, self._cache.layouts

        def forward(inputs: ModelInput) -> Tensor:
            return model.forward(inputs, caches)

        self._graphs = DecodeGraphs(gpu, forward, sizes, layouts, config.max_model_len)
        for size in dict.fromkeys((sizes[-1], sizes[0])):
            self.run(build_padding(size, layouts, self._transfers))

    def warm_up(self) -> None:
        """Samples in the usual ways, for nobody: what is compiled when it is first used would have a request
        wait for it, and all others with that. Only where padding can be computed: not by the reference."""
        inputs = build_padding(len(_USUAL), self._cache.layouts, self._transfers)
        hidden = self._model.forward(inputs, self._cache.layers)
        settings = np.array([settings_of(sampling) for sampling in _USUAL], SETTINGS)
        forbidding = {0: LogitEdits(forbidden=np.zeros(1, np.int64))}
        for rows, edits in (slice(0, 1), {}), (slice(0, 2), {}), (slice(0, 3), {}), (slice(0, 3), forbidding):
            chosen = settings[rows]
            self._transfers.begin()
            batch = SampleBatch(chosen, np.zeros(len(chosen), np.int64), edits)
            sampling = send(batch, self._transfers.add)
            self._transfers.send()
            self.read(draw(self._model, hidden[rows], sampling))

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
        self._host.wait()  # for what is queued already, which is not the swaps' time
        begin = time.perf_counter()
        swap(self._host, swaps)
        self._host.wait()
        return time.perf_counter() - begin

    def prepare(self, rows: Rows, plan: StepPlan, pool_parts: Sequence[PoolPart] = ()) -> Step:
        """The plan, applied to the rows already, as tensors on the device."""
        sizes = () if self._graphs is None else self._graphs.sizes
        return build_step(rows, plan, self._cache.layouts, self._transfers, pool_parts, sizes)

    def run(self, inputs: ModelInput) -> Tensor:
        """Writes the batch's K and V; returns the hidden states [R + P + E, H] of `inputs.sample_rows`."""
        if self._graphs is not None and self._graphs.takes(inputs):
            hidden = self._graphs.run(inputs)
        else:
            hidden = self._model.forward(inputs, self._cache.layers)
        return hidden.index_select(0, inputs.sample_rows)

    def draw(self, hidden: Tensor, step: Step) -> Drawn | None:
        """The tokens that follow the first R rows of `hidden`, for `read`. On a GPU it only queues them."""
        return draw(self._model, hidden[: len(step.seq_ids)], step.sampling)

    def read(self, drawn: Drawn | None) -> Samples:
        """Waits for the device."""
        return read(drawn, self._transfers)

    def prompt_logprobs(self, hidden: Tensor, step: Step) -> tuple[PromptLogprobs, ...]:
        """Of the prompt tokens that follow the P rows of `hidden` behind the first R. Waits for the device,
        if there are any."""
        if step.prompt_ids is None:
            return ()
        rows = hidden[len(step.seq_ids) :]
        return prompt_logprobs(self._model, rows, step.prompt_ids, step.prompt_parts, self._transfers)


def open_runner(
    model: Decoder, cache: KVCache, config: EngineConfig, gpu: Gpu | None, host: HostPool | None = None
) -> ModelRunner:
    """As `config` and the device want it."""
    if gpu is None:
        return ModelRunner(model, cache, host)
    runner = ModelRunner(model, cache, host, GpuTransfers(gpu, step_bytes(config)))
    runner.use_graphs(gpu, config)
    if gpu.can_capture:
        runner.warm_up()
    return runner


def run_largest_step(
    model: Decoder, make_cache: Callable[[int], KVCache], config: EngineConfig, gpu: Gpu | None = None
) -> int:
    """Takes as much memory as any step will, and gives it back: all the tokens and all the sequences that the
    configuration lets into one, each sampled at random from edited logits. They share the blocks of a small
    cache. Returns how many bytes graphs will take, and keep, beside that."""
    assert config.max_model_len is not None
    count = min(config.max_num_seqs, config.token_budget)
    length = min(config.token_budget // count, config.max_model_len)
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
    transfers = HOST if gpu is None else GpuTransfers(gpu, step_bytes(config))
    runner = ModelRunner(model, cache, None, transfers)
    step = runner.prepare(rows, plan)
    runner.read(runner.draw(runner.run(step.inputs), step))
    if gpu is None:
        return 0
    free_bytes = gpu.free_bytes()
    runner.use_graphs(gpu, config)
    return _GRAPH_FACTOR * max(free_bytes - gpu.free_bytes(), 0)
