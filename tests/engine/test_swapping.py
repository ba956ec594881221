"""The engine with host memory for evicted blocks, on a model: the same tokens whatever leaves and returns."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, SamplingParams
from octavo.engine.offline import Completion
from octavo.errors import StepFailed
from octavo.protocol import StepPlan
from octavo.request import TextDelta
from tiny_engine import preempt_every, tiny_engine, whole

PROMPTS = [[7 + i, *(3 + (i * j * j) % 250 for j in range(12 + 5 * i))] for i in range(10)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
FORKED = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=30, ignore_eos=True)
BEAMS = SamplingParams(use_beam_search=True, beam_width=3, n=2, max_tokens=20, ignore_eos=True)
MIXED = [GREEDY, FORKED, BEAMS, GREEDY, FORKED, GREEDY, BEAMS, GREEDY, FORKED, GREEDY]
MIB = 1 / 1024  # of swap_space, which is in GiB; a block of 4 tokens takes 3 KiB in float32


def crowded(folder: Path, **arguments: Any) -> Engine:
    """Whose cache holds about a third of what the prompts above become."""
    few = {"block_size": 4, "num_gpu_blocks_override": 64, "max_model_len": 128, "max_num_batched_tokens": 64}
    return tiny_engine(folder, **{**few, **arguments})


def tokens_of(done: list[Completion]) -> list[list[list[int]]]:
    return [[output.token_ids for output in completion.outputs] for completion in done]


@pytest.fixture(scope="module")
def unhurried(folder: Path) -> list[list[list[int]]]:
    with whole(tiny_engine(folder, block_size=4, max_model_len=128, num_gpu_blocks_override=2000)) as engine:
        done = tokens_of(engine.generate(PROMPTS, MIXED))
        assert engine.stats().preemptions_total == 0
        return done


@pytest.mark.parametrize("swap_space", [MIB, MIB / 8], ids=["roomy", "42 blocks"])
@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_the_tokens_are_the_same_when_everybody_is_preempted(
    folder: Path, unhurried: list[list[list[int]]], mode: str, swap_space: float
) -> None:
    with whole(crowded(folder, swap_space=swap_space, preemption_mode=mode)) as engine:
        assert tokens_of(engine.generate(PROMPTS, MIXED)) == unhurried
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert stats.num_host_blocks == int(swap_space * 2**30) // 3072
        assert stats.swapped_out_bytes_total > 0
        if mode == "swap":
            assert stats.swapped_in_bytes_total == stats.host_hits_total // 4 * 3072 > 0
            assert 0 < stats.num_used_host_blocks <= stats.num_host_blocks


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_quantised_block_comes_back_with_its_scales(folder: Path, kv_cache_dtype: str) -> None:
    done = []
    for blocks, mode in ((2000, "recompute"), (64, "swap")):
        arguments = {"kv_cache_dtype": kv_cache_dtype, "num_gpu_blocks_override": blocks}
        with whole(crowded(folder, swap_space=MIB, preemption_mode=mode, **arguments)) as engine:
            done.append(tokens_of(engine.generate(PROMPTS, GREEDY)))
            assert bool(engine.stats().swapped_in_bytes_total) == (mode == "swap")
    assert done[0] == done[1]


def test_a_preempted_sequence_computes_less_than_a_block_anew(folder: Path) -> None:
    """With room on the host for all of it: what is computed is at most a block more for each preemption."""
    with whole(crowded(folder, swap_space=MIB, preemption_mode="swap")) as engine:
        preempt_every(engine, 5)
        engine.generate(PROMPTS, GREEDY)
        stats = engine.stats()
        computed = sum(step.num_tokens for step in engine.steps.take())
    needed = sum(map(len, PROMPTS)) + len(PROMPTS) * (40 - 1)
    assert stats.preemptions_total > 20
    assert needed < computed <= needed + 4 * stats.preemptions_total


def test_evicted_prompts_come_back_and_count_as_cached(folder: Path) -> None:
    once = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[5 + i] * 100 for i in range(6)]
    with whole(crowded(folder, swap_space=MIB, preemption_mode="swap")) as engine:
        first, second = ([engine.generate([prompt], once)[0] for prompt in prompts] for _ in range(2))
        assert tokens_of(first) == tokens_of(second)
        stats = engine.stats()
        assert stats.cached_prompt_tokens_total == stats.prefix_hits_total == 6 * 96
        assert stats.host_hits_total > 4 * 96


def test_failing_steps_end_their_own_requests_and_no_token_of_the_others_changes(
    folder: Path, unhurried: list[list[list[int]]]
) -> None:
    with whole(crowded(folder, swap_space=MIB / 8, preemption_mode="swap")) as engine:
        swap, failing = engine._executor._runner.move_blocks, itertools.cycle([False] * 30 + [True])

        def swap_or_fail(plan: StepPlan) -> float:
            """Fails before anything is copied, now and then, when something is to be."""
            if (plan.swaps_out or plan.swaps_in) and next(failing):
                raise RuntimeError("made to fail")
            return swap(plan)

        engine._executor._runner.move_blocks = swap_or_fail  # type: ignore[method-assign]
        deltas: dict[str, list[TextDelta]] = defaultdict(list)
        for number, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
            for turn in range(3):
                request = engine.make_request(f"{number} {turn}", prompt, params)
                engine.add(request, lambda delta: deltas[delta.request_id].append(delta))
        while engine.has_work:
            engine.step()
            engine.check_integrity()
    failed = 0
    for number, expected in enumerate(unhurried):
        for turn in range(3):
            news = deltas[f"{number} {turn}"]
            assert [delta.request_finished for delta in news] == [False] * (len(news) - 1) + [True]
            if news[-1].error is not None:
                assert isinstance(news[-1].error, StepFailed)
                failed += 1
                continue
            tokens = [[t for d in news if d.index == i for t in d.token_ids] for i in range(len(expected))]
            assert tokens == expected
    assert 0 < failed < 30


def test_a_nan_does_not_survive_on_the_host(folder: Path) -> None:
    once = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt, others = [9] * 100, [[20 + i] * 100 for i in range(3)]
    with whole(crowded(folder, swap_space=MIB, preemption_mode="swap")) as engine:
        (good,) = tokens_of(engine.generate([prompt], once))
        engine.generate(others, once)
        pool = engine._executor._runner._host
        saved = pool.slots.clone()
        pool.slots.fill_(torch.nan)
        with pytest.raises(StepFailed, match="NaN"):
            engine.generate([prompt], once)
        pool.slots.copy_(saved)
        hits = engine.stats().host_hits_total
        assert hits > 0
        assert tokens_of(engine.generate([prompt], once)) == [good]
        assert engine.stats().host_hits_total == hits  # what had the NaN was computed anew
