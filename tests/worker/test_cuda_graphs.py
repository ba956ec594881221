"""Decode steps as graphs, on a device that is none: what a replay gives is what an eager step gives."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_gpu import FakeGpu
from octavo import Engine, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import OctavoError, StepFailed
from octavo.layers.inputs import ModelInput
from octavo.models.model_config import ModelConfig
from octavo.protocol import Executor, StepPlan, StepResult
from octavo.request import PoolingParams
from octavo.weights.loader import open_checkpoint
from octavo.worker.cuda_graphs import DecodeGraphs, decode_sizes
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_input import build_padding
from octavo.worker.model_runner import run_largest_step
from octavo.worker.transfers import GpuTransfers
from octavo_kernels import ops
from tiny import tiny_llama
from tiny_engine import preempt_every, tiny_engine, whole

SHARED = list(range(40, 80))
PROMPTS = [
    [7],
    [9, 30, 31],
    [*SHARED, 100, 101],
    [*SHARED, 110],
    [3 + (i * i) % 250 for i in range(99)],
    [5, 6],
    [200, 201, 202],
    [60, 61],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path)
    return path


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Engine]:
    """`on(gpu, **engine_arguments)`."""

    def make(gpu: FakeGpu | None, **arguments: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("octavo.worker.executor.open_gpu", lambda _: gpu)
            return tiny_engine(folder, **arguments)

    return make


def sizes_of(**arguments: Any) -> tuple[int, ...]:
    return decode_sizes(EngineConfig(model="m", **arguments))


def test_sizes_end_with_the_most_sequences_there_may_be() -> None:
    assert sizes_of(max_num_seqs=1) == (1,)
    assert sizes_of(max_num_seqs=5) == (1, 2, 4, 5)
    assert sizes_of(max_num_seqs=24) == (1, 2, 4, 8, 16, 24)
    assert sizes_of(max_num_seqs=200)[-6:] == (112, 120, 128, 160, 192, 200)
    assert len(sizes_of()) == 23


def test_sizes_may_be_chosen_and_switched_off() -> None:
    assert sizes_of(cudagraph_capture_sizes=(8, 2, 64, 2), max_num_seqs=32) == (2, 8)
    assert sizes_of(cudagraph_capture_sizes=(64,), max_num_seqs=32) == ()
    assert sizes_of(enforce_eager=True) == ()


def different_params() -> list[SamplingParams]:
    """Ends at different times, so that the batch shrinks; drawn, edited, forked, searched by beams."""
    forever: dict[str, Any] = {"ignore_eos": True}
    return [
        SamplingParams(temperature=0, max_tokens=30, **forever),
        SamplingParams(temperature=1.5, seed=5, max_tokens=9, n=3, **forever),
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1, **forever),
        SamplingParams(temperature=0.9, seed=6, top_p=0.9, max_tokens=17, repetition_penalty=1.2, **forever),
        SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=(8, 9, 10), **forever),
        SamplingParams(temperature=2, seed=7, top_k=20, max_tokens=25, logprobs=0, **forever),
        SamplingParams(temperature=0, max_tokens=24, logit_bias={70: 3.0}, bad_words=("a",), **forever),
        SamplingParams(temperature=0, max_tokens=12, use_beam_search=True, n=2, **forever),
    ]


@dataclass
class Answers:
    said: list[Any]  # token ids and texts
    logprobs: NDArray[np.float64]  # all of them; they depend on the batch by a rounding

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answers)
        return self.said == other.said and np.allclose(self.logprobs, other.logprobs, atol=1e-4)


def answers(engine: Engine, count: int = len(PROMPTS)) -> Answers:
    """Of the first prompts together, then of some again, whose beginnings are in the cache."""
    with whole(engine):
        completions = engine.generate(PROMPTS[:count], different_params()[:count], progress=False)
        completions += engine.generate(PROMPTS[2:4], different_params()[:2], progress=False)
    outputs = [output for completion in completions for output in completion.outputs]
    tokens = [token for output in outputs for token in output.logprobs]
    tokens += [token for completion in completions for token in completion.prompt_logprobs or () if token]
    return Answers(
        [(output.token_ids, output.text) for output in outputs],
        np.array([entry.logprob for token in tokens for entry in token]),
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"max_num_batched_tokens": 20},
    "other blocks": {"block_size": 8, "max_num_seqs": 5},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "sizes given": {"cudagraph_capture_sizes": (3, 6)},
    "swapping": {"max_model_len": 128, "num_gpu_blocks_override": 14, "swap_space": 0.01},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_eager_steps_and_of_a_cpu(on: Callable[..., Engine], name: str) -> None:
    arguments = VARIANTS[name]
    cpu, eager, graphs = None, FakeGpu(), FakeGpu()
    expected = answers(on(cpu, **arguments))
    assert answers(on(eager, **arguments, enforce_eager=True)) == expected
    assert not eager.captured
    engine = on(graphs, **arguments)
    sizes = engine._executor._runner._graphs.sizes  # type: ignore[attr-defined]
    assert graphs.captured == [sizes[-1], sizes[0]]  # before any request
    assert answers(engine) == expected
    assert (engine.stats().swapped_out_bytes_total > 0) == (name == "swapping")
    assert len(graphs.replayed) > 20
    assert len(set(graphs.replayed)) > 1
    assert sorted(graphs.captured) == sorted(set(graphs.captured)), "a size was captured twice"


def test_preempted_sequences_resume_in_graphs(on: Callable[..., Engine]) -> None:
    gpu, count = FakeGpu(), len(PROMPTS) - 1  # beams are not preempted one by one
    expected = answers(on(None), count)
    engine = on(gpu)
    preempt_every(engine, 5)
    assert answers(engine, count) == expected
    assert engine.stats().preemptions_total > 5
    assert gpu.replayed


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_embeddings_on_the_way(on: Callable[..., Engine], enforce_eager: bool) -> None:
    """A prompt of one token is a decode step's shape, but its hidden state is wanted."""
    vectors = []
    for gpu in (None, FakeGpu()):
        engine = on(gpu, enforce_eager=enforce_eager)
        with whole(engine):
            found: list[Any] = []
            for number, pooling in enumerate((PoolingParams("last"), PoolingParams("mean"))):
                request = engine.make_request(str(number), [7] if number else SHARED, embed=pooling)
                engine.add(request, found.append)
            while engine.has_work:
                engine.step()
        vectors.append([delta.embedding for delta in found if delta.embedding])
    assert len(vectors[0]) == 2
    for one, other in zip(*vectors, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_there_are_no_graphs_where_kernels_cannot_be_captured(on: Callable[..., Engine]) -> None:
    gpu = FakeGpu()
    gpu.can_capture = False
    assert answers(on(gpu)) == answers(on(None))
    assert not gpu.captured


@pytest.mark.parametrize("fails_at", [16, 2])
def test_a_capture_that_fails_switches_graphs_off_with_one_line(
    on: Callable[..., Engine], caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    expected = answers(on(None))
    gpu = FakeGpu(fails_at=(fails_at,))
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert answers(on(gpu)) == expected
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"CUDA graphs are off, so decode steps wait for the CPU: capturing {fails_at} rows failed" in line
    assert "RuntimeError: operation not permitted" in line


class _NoWaiting(TorchDispatchMode):
    """What would make the host wait for a GPU is an error, as far as torch's operations do it."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} waits for the device"
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype == torch.int64 for index in indices), (
                "a mask has to be read to be an index"
            )
        return func(*args, **(kwargs or {}))


class Watched:
    """An executor whose `submit` must not wait, and whose `collect` reads once."""

    def __init__(self, inner: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inner = inner
        self._monkeypatch = monkeypatch
        self.reads: list[int] = []
        read = GpuTransfers.read

        def counted(transfers: GpuTransfers, tensors: Any) -> Any:
            self.reads[-1] += 1
            return read(transfers, tensors)

        monkeypatch.setattr(GpuTransfers, "read", counted)

    def submit(self, plan: StepPlan) -> None:
        self.reads.append(0)
        with self._monkeypatch.context() as patch, _NoWaiting():
            for name in ("cpu", "item", "tolist", "nonzero"):
                patch.setattr(Tensor, name, _waits)
            self._inner.submit(plan)
        assert self.reads[-1] == 0

    def collect(self) -> StepResult:
        return self._inner.collect()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _waits(*_: Any) -> Any:
    raise AssertionError("the host waits for the device")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_step_is_queued_without_waiting_and_read_once(
    on: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    engine = on(FakeGpu(), enforce_eager=enforce_eager, max_num_batched_tokens=40)
    watched = Watched(engine._executor, monkeypatch)
    engine._executor = watched  # type: ignore[assignment]
    params = different_params()
    of_its_prompt = params[2]
    params[2] = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    with whole(engine):
        engine.generate(PROMPTS, params, progress=False)
        assert len(watched.reads) > 20
        assert set(watched.reads) == {1}
        for params_of_one, expected in ((params[0], [0, 0, 1, 1]), (of_its_prompt, [1, 1, 2, 1])):
            watched.reads.clear()
            prompt = [*range(sum(expected), 90)]  # in three chunks, and not in the cache
            engine.generate([prompt], params_of_one, progress=False)
            # None before there is a token; a prompt's log-probabilities come by themselves.
            assert watched.reads[:4] == expected


def test_a_step_that_nobody_waits_for_has_no_time(on: Callable[..., Engine]) -> None:
    """What it takes would be that of its launches."""
    engine = on(FakeGpu(), max_num_batched_tokens=40)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(engine.make_request("a", list(range(90)), params), lambda _: None)
    times = []
    while engine.has_work:
        before = engine.stats()
        engine.step()
        now = engine.stats()
        times.append(
            (now.forward_s_total > before.forward_s_total, now.sample_s_total > before.sample_s_total)
        )
    assert times[:4] == [(False, False), (False, False), (True, True), (True, True)]


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_gpu_that_is_lost_ends_the_engine_and_not_only_a_step(
    on: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gpu = FakeGpu()
    engine = on(gpu)
    finals: list[Any] = []
    engine.add(engine.make_request("a", [7, 8], SamplingParams(max_tokens=9)), finals.append)

    def broken(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if where == "submit":
        monkeypatch.setattr(engine._executor._runner._model, "forward", broken)  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(GpuTransfers, "read", broken)
    engine.step()  # an error of this step alone
    (answer,) = finals
    assert isinstance(answer.error, StepFailed)
    gpu.lost = True
    engine.add(engine.make_request("b", [7, 8], SamplingParams(max_tokens=9)), finals.append)
    with pytest.raises(OctavoError, match=r"the GPU is lost .* illegal memory access") as raised:
        engine.step()
    assert not isinstance(raised.value, StepFailed)


def test_a_step_begins_before_the_tokens_of_the_last_one_are_delivered(on: Callable[..., Engine]) -> None:
    engine = on(FakeGpu())
    events: list[str] = []
    run = engine._executor._runner.run  # type: ignore[attr-defined]
    engine._executor._runner.run = lambda inputs: events.append("forward") or run(inputs)  # type: ignore
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add(engine.make_request("a", PROMPTS[2], params), lambda _: events.append("deliver"))
    while engine.has_work:
        engine.step()
    assert events == ["forward", "forward", "deliver", "forward", "deliver", "deliver"]


@pytest.mark.parametrize("can_capture", [True, False])
def test_what_samples_is_compiled_before_the_first_request(
    on: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, can_capture: bool
) -> None:
    """The reference has nothing to compile, and takes no padding."""
    seen = set()

    def watch(name: str) -> None:
        right = getattr(ops, name)

        def watched(logits: Tensor, *arguments: Any) -> Any:
            seen.add((name, logits.dtype))
            return right(logits, *arguments)

        monkeypatch.setattr(ops, name, watched)

    for name in ("best_token", "sample", "token_logprobs"):
        watch(name)
    gpu = FakeGpu()
    gpu.can_capture = can_capture
    on(gpu, dtype="bfloat16")
    half, edited = torch.bfloat16, torch.float32
    expected = {
        ("token_logprobs", half),
        *((kind, t) for kind in ("best_token", "sample") for t in (half, edited)),
    }
    assert seen == (expected if can_capture else set())


@pytest.fixture
def cache(folder: Path) -> KVCache:
    config = ModelConfig.from_dict(open_checkpoint(str(folder)).config())
    return KVCache(config, 4, 16, torch.float32, torch.device("cpu"))


def test_padding_stores_nothing_and_sees_nothing(on: Callable[..., Engine]) -> None:
    gpu = FakeGpu()
    runner = on(gpu)._executor._runner  # type: ignore[attr-defined]
    memory = runner._cache._data
    memory.fill_(torch.nan)
    with gpu.stream(), torch.inference_mode():
        for _ in range(2):
            hidden = runner._graphs.run(build_padding(4, runner._cache.layouts, runner._transfers))
            assert hidden.shape == (4, 48)
            assert hidden.isfinite().all()
    assert gpu.replayed == [4]
    assert memory.isnan().all()


def test_a_step_whose_arrays_lie_elsewhere_is_not_replayed(on: Callable[..., Engine]) -> None:
    gpu = FakeGpu()
    runner = on(gpu)._executor._runner  # type: ignore[attr-defined]
    with gpu.stream(), torch.inference_mode():
        inputs = build_padding(16, runner._cache.layouts, GpuTransfers(gpu, 10_000))
        with pytest.raises(AssertionError, match="lie elsewhere"):
            runner.run(inputs)


def test_a_graph_is_launched_for_the_longest_context_there_may_be() -> None:
    """Whatever the step that it is captured with: the next one may have any."""
    gpu, layouts = FakeGpu(), (ops.KVLayout(2, 16, None, torch.device("cpu")),)
    launched: list[ModelInput] = []

    def forward(inputs: ModelInput) -> Tensor:
        launched.append(inputs)
        return inputs.input_ids[:, None].float()

    graphs = DecodeGraphs(gpu, forward, (1, 3), layouts, max_model_len=100)
    transfers = GpuTransfers(gpu, 10_000)
    with gpu.stream():
        for _ in range(2):
            hidden = graphs.run(build_padding(3, layouts, transfers))
            assert hidden.tolist() == [[0], [0], [0]]
    assert len(launched) == 3  # the step itself, its capture, and a replay
    for inputs in launched:
        (batch,) = inputs.attention
        assert batch.block_tables.shape == (3, 7)
        assert (batch.plan.num_single, batch.plan.longest_context, batch.plan.longest_query) == (3, 100, 1)
        assert inputs is launched[0]


@pytest.mark.parametrize(("enforce_eager", "expected"), [(False, 2 * 1000 * 9), (True, 0)])
def test_the_profile_tells_what_graphs_take(
    on: Callable[..., Engine], cache: KVCache, enforce_eager: bool, expected: int
) -> None:
    model = on(None)._executor._runner._model  # type: ignore[attr-defined]
    config = EngineConfig(
        "m", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=128, enforce_eager=enforce_eager
    )
    gpu = FakeGpu()
    with gpu.stream(), torch.inference_mode():
        assert run_largest_step(model, lambda _: cache, config, gpu) == expected
    assert gpu.captured == ([] if enforce_eager else [8, 1])
    assert np.isfinite(cache._data[:, :, 0].numpy()).all()
