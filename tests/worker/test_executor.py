"""The executor as the engine sees it: plans in, results out, failures contained."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, StepFailed
from octavo.models.model_config import ModelConfig
from octavo.protocol import Executor, Fork, NewSequence, RowSampling, Slice, StepPlan
from octavo.weights.loader import open_checkpoint
from octavo.worker.executor import LocalExecutor, resolve_device, resolve_dtype
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_runner import run_largest_step
from octavo_kernels import ops
from octavo_kernels.cpu import library
from octavo_kernels.cpu import linear as cpu_linear
from tiny import tiny_llama

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path)
    return path


def make_executor(folder: Path, **options: Any) -> LocalExecutor:
    checkpoint = open_checkpoint(str(folder))
    model_config = ModelConfig.from_dict(checkpoint.config())
    values = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        **options,
    }
    config = EngineConfig(**values).for_model(model_config.max_positions)
    return LocalExecutor(config, checkpoint, model_config)


def run(executor: Executor, **parts: Any) -> dict[int, tuple[int, ...]]:
    executor.submit(StepPlan(**{"step_id": 1, **parts}))
    return {r.seq_id: r.token_ids for r in executor.collect().sequences}


def thread_counts() -> tuple[int, int]:
    return ops.num_threads(), torch.get_num_threads()


def prompt(seq_id: int, blocks: tuple[int, ...], sampling: RowSampling = GREEDY) -> dict[str, Any]:
    token_ids = (40, 50, 60, seq_id + 100)
    piece = Slice(seq_id, 0, 4, 0, blocks, (seq_id,))
    return {"new": (NewSequence(seq_id, token_ids, 4, sampling),), "slices": (piece,)}


def test_results_come_in_the_order_of_the_samples(folder: Path) -> None:
    executor = make_executor(folder)
    logprobs = RowSampling(0.0, 0, 1.0, 0.0, seed=0, num_logprobs=2)
    one, two = prompt(1, (0,), logprobs), prompt(2, (1,))
    plan = StepPlan(
        step_id=9,
        new=one["new"] + two["new"],
        slices=(Slice(2, 0, 4, 0, (1,), (2, 3)), Slice(1, 0, 4, 0, (0,), (1,))),
        forks=(Fork(2, 3, logprobs),),
    )
    executor.submit(plan)
    result = executor.collect()
    assert result.step_id == 9
    assert [r.seq_id for r in result.sequences] == [2, 3, 1]
    assert [len(r.token_ids) for r in result.sequences] == [1, 1, 1]
    assert [len(r.logprobs) for r in result.sequences] == [0, 1, 1]
    assert result.sequences[0].token_ids == result.sequences[1].token_ids
    for r in result.sequences[1:]:
        assert r.logprobs[0].token_ids[0] == r.token_ids[0]
        assert r.logprobs[0].ranks == (1, 2)
    assert 0 < result.forward_s < 60
    assert 0 < result.sample_s < 60


def test_sampled_tokens_are_kept_in_the_rows(folder: Path) -> None:
    """Decoding goes on from what was sampled, without being told: a whole prompt gives the same."""
    executor = make_executor(folder)
    generated = [run(executor, **prompt(1, (0,)))[1][0]]
    for position in range(4, 9):
        generated.append(run(executor, slices=(Slice(1, position, 1, 0, (), (1,)),))[1][0])
    token_ids = (40, 50, 60, 101, *generated[:-1])
    whole = NewSequence(2, token_ids, 4, GREEDY)
    again = run(executor, new=(whole,), slices=(Slice(2, 0, len(token_ids), 0, (5,), (2,)),))
    assert again[2][0] == generated[-1]


def test_a_failed_step_is_reported_and_the_executor_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(folder)
    expected = run(executor, **prompt(1, (0,)))[1]
    run(executor, slices=(Slice(1, 4, 1, 0, (), (1,)),))

    def broken(*_: object) -> None:
        raise ValueError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr("octavo_kernels.ops.add_rms_norm", broken)
        executor.submit(StepPlan(step_id=7, finished=(1,), **prompt(2, (1,))))
        with pytest.raises(StepFailed, match=r"^step 7 failed: ValueError: out of luck$") as failure:
            executor.collect()
    assert isinstance(failure.value.__cause__, ValueError)
    # 2 has a row and 3 has not: both are dropped, and the ids may come back.
    again = run(executor, finished=(2, 3), **prompt(1, (0,)))
    assert again[1] == expected
    assert run(executor, **prompt(2, (1,))).keys() == {2}


def test_a_plan_for_a_sequence_without_a_row_is_a_failed_step(folder: Path) -> None:
    executor = make_executor(folder)
    executor.submit(StepPlan(step_id=3, slices=(Slice(77, 0, 1, 0, (), (77,)),)))
    with pytest.raises(StepFailed, match="step 3 failed: KeyError: 77"):
        executor.collect()


def test_a_row_of_nan_ends_its_own_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(folder)
    one, two = prompt(1, (0,)), prompt(2, (1,))
    from octavo.models.decoder import Decoder

    right = Decoder.forward

    def spoiled(*arguments: Any) -> torch.Tensor:
        hidden = right(*arguments)
        hidden[: one["slices"][0].length] = torch.nan
        return hidden

    monkeypatch.setattr(Decoder, "forward", spoiled)
    plan = StepPlan(step_id=1, new=one["new"] + two["new"], slices=one["slices"] + two["slices"])
    executor.submit(plan)
    bad, good = executor.collect().sequences
    assert bad.token_ids == bad.logprobs == ()
    assert bad.error is not None
    assert "NaN" in bad.error
    assert good.error is None
    assert len(good.token_ids) == 1


def test_a_nan_in_a_freed_block_does_not_reach_its_next_owner(folder: Path) -> None:
    executor = make_executor(folder)
    expected = run(executor, **prompt(1, (0,)))[1]
    for layer in executor._runner._cache.layers:
        layer.k[3:5] = torch.nan
        layer.v[3:5] = torch.nan
    again = run(executor, finished=(1,), **prompt(1, (3,)))
    assert again[1] == expected
    assert run(executor, slices=(Slice(1, 4, 1, 0, (), (1,)),))[1]


def test_what_an_operator_is_told(folder: Path) -> None:
    executor = make_executor(
        folder, kv_cache_memory_bytes=2**20, num_gpu_blocks_override=None, max_model_len=64
    )
    assert executor.block_bytes == 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, heads, slots, head size, bytes
    assert executor.num_blocks == 2**20 // executor.block_bytes
    assert executor.kv_limit == "kv_cache_memory_bytes = 1.0 MiB"


def test_a_cache_that_cannot_be_allocated(folder: Path) -> None:
    expected = r"KV cache of 12288.0 GiB \(num_gpu_blocks_override = 1073741824\) cannot be allocated"
    with pytest.raises(ConfigError, match=expected):
        make_executor(folder, num_gpu_blocks_override=2**30)


def test_a_device_without_room_is_a_matter_of_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("octavo.worker.executor.load_weights", full)
    with pytest.raises(
        ConfigError, match=r"no room for the weights .* CUDA out of memory\.; lower max_num_ba"
    ):
        make_executor(folder)


@pytest.mark.parametrize(
    ("wanted", "cores", "expected", "warned"),
    [(None, 2, 2, False), (None, 8, 3, False), (2, 4, 2, False), (4, 2, 4, True)],
    ids=["no more than cores", "as torch has it", "as told", "as told, though too many"],
)
def test_the_number_of_threads(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: int | None,
    cores: int,
    expected: int,
    warned: bool,
) -> None:
    monkeypatch.setattr("octavo.worker.executor.usable_cores", lambda: cores)
    before = torch.get_num_threads()
    library.set_num_threads(None)
    torch.set_num_threads(3)
    seen: list[int] = []
    try:
        make_executor(folder, num_threads=wanted)
        thread = threading.Thread(target=lambda: seen.extend(thread_counts()))  # the engine's, say
        thread.start()
        thread.join()
        torchs = 1 if cpu_linear.serves(torch.float32) else expected  # whose threads would be in the way
        assert [*thread_counts(), *seen] == [expected, torchs] * 2
    finally:
        library.set_num_threads(None)
        torch.set_num_threads(before)
    text = "'num_threads' is 4, but this process may use 2 cores: the forward will be slower than with 2"
    assert (text in caplog.messages) == warned


def test_the_largest_step_runs(folder: Path) -> None:
    """What a GPU's memory profile runs, here on the CPU."""
    executor = make_executor(folder)
    model_config = ModelConfig.from_dict(open_checkpoint(str(folder)).config())
    sizes = []

    def make_cache(num_blocks: int) -> KVCache:
        sizes.append(num_blocks)
        return KVCache(model_config, num_blocks, 16, torch.float32, torch.device("cpu"))

    config = EngineConfig("m", max_model_len=100, max_num_seqs=4, max_num_batched_tokens=512)
    with torch.inference_mode():
        run_largest_step(executor._runner._model, make_cache, config)
    assert sizes == [7]  # 100 tokens each, in the same blocks


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [resolve_device(name).type for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="'device' is 'cuda', but torch finds no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_dtypes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", "bfloat16", cpu) == torch.bfloat16
    assert resolve_dtype("auto", "float32", cpu) == torch.float32
    assert resolve_dtype("auto", "float16", cpu) == torch.bfloat16
    assert resolve_dtype("auto", "float16", cuda) == torch.float16
    assert resolve_dtype("float32", "bfloat16", cuda) == torch.float32
    assert resolve_dtype("float16", "bfloat16", cpu) == torch.float16
