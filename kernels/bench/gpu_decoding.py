"""Part of `gpu.py`: whole decode steps of a model of random weights, by Octavo's runner, with CUDA graphs and
without, and by Transformers.

A step's floor is the time in which the card copies as many bytes as the step has to read: all weights but the
embedding's, and the keys and values of all tokens in the context.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from gpu_limits import BLOCK_SIZE, Limits
from gpu_report import Row, guarded
from torch import Tensor

from octavo.config import EngineConfig
from octavo.models.decoder import Decoder
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.protocol import NewSequence, RowSampling, Slice, StepPlan
from octavo.worker.gpu import open_gpu
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_runner import ModelRunner, open_runner
from octavo.worker.rows import Rows

GOAL = 0.7
WARM_UP = 3  # steps that compile, and capture
_GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TOY = LLAMA_2_7B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@dataclass(frozen=True)
class Work:
    """Each sequence of a batch gets a token behind a context of so many."""

    values: dict[str, Any]
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    steps: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.values)

    def floor_s(self, batch: int, limits: Limits) -> float:
        config = self.config
        attention = config.hidden_size * config.head_size * (2 * config.num_heads + 2 * config.num_kv_heads)
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        weights = config.num_layers * layer + config.vocab_size * config.hidden_size
        of_tokens = batch * self.context * 2 * config.num_layers * config.num_kv_heads * config.head_size
        return (weights + of_tokens) * self.dtype.itemsize / limits.bytes_per_s


REAL = Work(LLAMA_2_7B, torch.bfloat16, (1, 16, 64, 256), 512, 20)
SMALL = Work(TOY, torch.float32, (1, 3), 20, 2)


def rows(device: torch.device, limits: Limits, toy: bool) -> Iterator[Row]:
    work = SMALL if toy else REAL
    config, most = work.config, work.batches[-1]
    length = work.context + WARM_UP + work.steps
    blocks_each = -(-length // BLOCK_SIZE)
    engine = EngineConfig("none", max_model_len=length, max_num_seqs=most, block_size=BLOCK_SIZE)
    engine = engine.for_model(config.max_positions)
    gpu = open_gpu(device)
    on_stream = nullcontext if gpu is None else gpu.stream  # the worker's own, as in a server
    with on_stream():
        model = _random_model(config, work.dtype, device)
        cache = KVCache(config, most * blocks_each, BLOCK_SIZE, work.dtype, device)
        for layer in cache.layers:
            layer.k.normal_()
            layer.v.normal_()
        runner = open_runner(model, cache, engine, gpu)
    for batch in work.batches:
        with on_stream():
            step_s = _steps(runner, work, batch, blocks_each)
        fraction = work.floor_s(batch, limits) / step_s
        yield Row(f"decode step, {batch} x {work.context}", 1e3 * step_s, "ms", fraction, GOAL)
    if gpu is None:
        return
    with on_stream():
        eager = open_runner(model, cache, replace(engine, enforce_eager=True), gpu)
    for batch in work.batches:
        with on_stream():
            by_graph, plain = (_hidden(one, work, batch, blocks_each) for one in (runner, eager))
            error = float((by_graph - plain).norm() / plain.norm())
            step_s = _steps(eager, work, batch, blocks_each)
        yield Row(f"graph against eager, {batch}", error, "relative error", goal=2e-2, is_check=True)
        fraction = work.floor_s(batch, limits) / step_s
        yield Row(f"decode step without a graph, {batch} x {work.context}", 1e3 * step_s, "ms", fraction)


def transformers_rows(device: torch.device, limits: Limits, toy: bool) -> Iterator[Row]:
    work = SMALL if toy else REAL
    model = _transformers_model(work, device)
    for batch in work.batches:
        label = f"the same by Transformers, {batch} x {work.context}"
        yield from guarded(label, _transformers_row(label, model, work, device, batch, limits))


def _random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    model = build_model(config, dtype, device)
    for name, weight in model.weight_map():
        weight.fill_(1.0) if "norm" in name else weight.normal_(std=0.02)
    model.finish_loading()
    return model


def _plan(number: int, work: Work, batch: int, blocks_each: int) -> StepPlan:
    """The step of that number, from 0 on, in which each sequence gets a token."""
    slices, new = [], []
    for seq in range(batch):
        blocks = () if number else tuple(range(seq * blocks_each, (seq + 1) * blocks_each))
        slices.append(Slice(seq, work.context - 1 + number, 1, 0, blocks, (seq,)))
        if not number:
            new.append(NewSequence(seq, (1,) * work.context, work.context, _GREEDY))
    return StepPlan(number, tuple(slices), new=tuple(new))


def _steps(runner: ModelRunner, work: Work, batch: int, blocks_each: int) -> float:
    """The median time of a step, from its plan on the host to its tokens there."""
    rows = Rows()
    taken = []
    for number in range(WARM_UP + work.steps):
        plan = _plan(number, work, batch, blocks_each)
        begin_s = time.perf_counter()
        rows.apply(plan)
        step = runner.prepare(rows, plan)
        samples = runner.read(runner.draw(runner.run(step.inputs), step))
        rows.append(step.row_to_sequence, samples.token_ids)
        taken.append(time.perf_counter() - begin_s)
        assert samples.usable.all(), "a NaN"
    return median(taken[WARM_UP:])


def _hidden(runner: ModelRunner, work: Work, batch: int, blocks_each: int) -> Tensor:
    """What the first step makes of it, when it is done for the second time: then by a graph."""
    rows, plan = Rows(), _plan(0, work, batch, blocks_each)
    rows.apply(plan)
    step = runner.prepare(rows, plan)
    runner.run(step.inputs)
    return runner.run(step.inputs).double()


def _transformers_row(
    label: str, model: Any, work: Work, device: torch.device, batch: int, limits: Limits
) -> Iterator[Row]:
    step_s = _transformers_steps(model, work, device, batch)
    yield Row(label, 1e3 * step_s, "ms", work.floor_s(batch, limits) / step_s)


def _transformers_model(work: Work, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{name: value for name, value in work.values.items() if name != "model_type"})
    previous = torch.get_default_dtype()
    torch.set_default_dtype(work.dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)


def _transformers_steps(model: Any, work: Work, device: torch.device, batch: int) -> float:
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache()
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(batch, heads, work.context - 1, size, dtype=work.dtype, device=device)
        cache.update(keys, keys.clone(), layer)
    tokens = torch.ones(batch, 1, dtype=torch.int64, device=device)
    taken = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a name that all versions know, and some regret
        for _ in range(WARM_UP + work.steps):
            begin_s = time.perf_counter()
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            tokens.cpu()
            taken.append(time.perf_counter() - begin_s)
    return median(taken[WARM_UP:])
