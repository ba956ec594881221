"""The whole engine on the GPU's kernels and a device that is none: tokens are those of the CPU's kernels."""

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fake_gpu import FakeGpu
from octavo import Engine, SamplingParams
from octavo_kernels import gpu as gpu_kernels
from octavo_kernels.gpu import activation, block_copy, kv_store, paged_attention, rms_norm, sampling
from tiny import tiny_llama
from tiny_engine import tiny_engine, whole

SHARED = list(range(40, 58))
PROMPTS = [[7, 8, 9], [*SHARED, 100], [3 + (i * i) % 250 for i in range(30)]]
LATER = [*SHARED, 110, 111]  # begins with a full block of a prompt before
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(
    temperature=1.2, seed=5, top_k=30, top_p=0.9, max_tokens=3, n=2, ignore_eos=True, repetition_penalty=1.3
)


KERNELS = {
    activation: ("silu_and_mul",),
    block_copy: ("copy_blocks",),
    kv_store: ("rope_and_store",),
    paged_attention: ("paged_attention",),
    rms_norm: ("add_rms_norm", "rms_norm"),
    sampling: ("best_token", "sample", "token_logprobs"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path, head_dim=64, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=2)
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr("octavo.worker.executor.open_gpu", lambda _: fake)
    return fake


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the kernels was asked."""
    counts: Counter[str] = Counter()

    def watch(module: ModuleType, name: str) -> None:
        right = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return right(*arguments)

        monkeypatch.setattr(module, name, counted)

    for module, names in KERNELS.items():
        for name in names:
            watch(module, name)
    return counts


def answers(engine: Engine) -> list[list[list[int]]]:
    with whole(engine):
        completions = engine.generate(PROMPTS, [GREEDY, DRAWN, GREEDY], progress=False)
        completions += engine.generate([LATER], GREEDY, progress=False)
        assert engine.stats().prefix_hits_total > 0
        assert engine.stats().block_copies_total > 0  # the two that are drawn share a block at first
    return [[output.token_ids for output in completion.outputs] for completion in completions]


@pytest.mark.parametrize(
    "arguments",
    [{"cudagraph_capture_sizes": (4,)}, {"kv_cache_dtype": "int8", "enforce_eager": True}],
    ids=["graphs", "int8"],
)
def test_tokens_are_those_of_the_cpu(
    folder: Path,
    gpu: FakeGpu,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
) -> None:
    arguments = {**arguments, "max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 64}
    arguments["num_gpu_blocks_override"] = 20
    found = answers(tiny_engine(folder, **arguments))
    assert bool(gpu.replayed) == ("enforce_eager" not in arguments)
    assert calls.keys() == {name for names in KERNELS.values() for name in names}
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_kernels, "serves", lambda x: False)
        patch.setattr("octavo.worker.executor.open_gpu", lambda _: None)
        assert found == answers(tiny_engine(folder, **arguments))
    assert not calls
