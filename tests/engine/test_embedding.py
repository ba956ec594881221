"""Embeddings of a tiny random model: the hidden states of Transformers, however the work is cut up."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics import relative_error
from octavo import Engine, SamplingParams
from octavo.engine.embedding import embedding_of
from octavo.errors import InvalidArgument, PromptTooLong, StepFailed
from octavo.protocol import StepPlan
from octavo.request import PoolingParams, TextDelta
from tiny_engine import tiny_engine, whole

SHARED = list(range(40, 80))
LONG = [3 + (i * i) % 250 for i in range(99)]
PROMPTS = [[7], list(range(5, 22)), [*SHARED, 100, 101], [*SHARED, 110], LONG]
LAST, MEAN = PoolingParams("last"), PoolingParams("mean")


@pytest.fixture(scope="module")
def hidden(reference: Any) -> list[torch.Tensor]:
    """Of each prompt, [tokens, H], after the last norm."""
    with torch.no_grad():
        return [reference.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


build = partial(tiny_engine, max_num_seqs=8, num_gpu_blocks_override=256)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with whole(build(folder)) as engine:
        yield engine


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def embed(engine: Engine, *wanted: tuple[list[int], PoolingParams]) -> list[torch.Tensor]:
    """All together."""
    deltas: list[list[TextDelta]] = [[] for _ in wanted]
    for number, ((prompt, pooling), sink) in enumerate(zip(wanted, deltas, strict=True)):
        engine.add(engine.make_request(f"e{number}", prompt, embed=pooling), sink.append)
    finish(engine)
    vectors = []
    for (prompt, _), (delta,) in zip(wanted, deltas, strict=True):
        assert delta.request_finished
        assert (delta.error, delta.text, delta.token_ids, delta.finish_reason) == (None, "", (), "stop")
        assert delta.num_prompt_tokens == len(prompt)
        assert delta.embedding is not None
        vectors.append(torch.tensor(delta.embedding, dtype=torch.float64))
    return vectors


def expected(states: torch.Tensor, pooling: PoolingParams) -> torch.Tensor:
    pooled = states.double().mean(0) if pooling.pooling == "mean" else states[-1].double()
    vector = pooled[: pooling.dimensions]
    return vector / torch.linalg.vector_norm(vector)


def preempt_every(engine: Engine, steps: int) -> None:
    scheduler, count = engine._scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def schedule_after_preempting() -> StepPlan | None:
        if next(count) % steps == 0 and scheduler._running:
            scheduler._preempt(scheduler._running.pop())
        return schedule()

    scheduler.schedule = schedule_after_preempting  # type: ignore[method-assign]


# A mean begins anew when it is preempted, so there must be steps enough in between for the longest prompt.
@pytest.mark.parametrize(
    ("block_size", "budget", "preempt_steps"),
    [(1, 16, None), (8, 16, 9), (16, 60, None), (16, 60, 4), (16, 2048, None)],
)
def test_vectors_are_those_of_transformers_however_the_work_is_cut(
    folder: Path, hidden: list[torch.Tensor], block_size: int, budget: int, preempt_steps: int | None
) -> None:
    engine = build(
        folder,
        block_size=block_size,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=4096 // block_size,
    )
    if preempt_steps:
        preempt_every(engine, preempt_steps)
    wanted = [(prompt, pooling) for prompt in PROMPTS for pooling in (LAST, MEAN)]
    truths = [expected(states, pooling) for states in hidden for pooling in (LAST, MEAN)]
    for _ in range(2):  # the second time every prefix is in the cache
        for vector, truth in zip(embed(engine, *wanted), truths, strict=True):
            assert float(torch.linalg.vector_norm(vector)) == pytest.approx(1, abs=1e-12)
            assert relative_error(vector, truth) < 1e-5
    stats = engine.stats()
    assert (stats.preemptions_total > 0) == (preempt_steps is not None)
    assert stats.prefix_hits_total > 0
    assert stats.generation_tokens_total == 0
    assert stats.num_used_blocks == 0


def test_a_mean_over_chunks_is_that_over_the_whole(engine: Engine, folder: Path) -> None:
    chunked = build(folder, max_num_batched_tokens=8)
    (whole,), (parts,) = embed(engine, (PROMPTS[4], MEAN)), embed(chunked, (PROMPTS[4], MEAN))
    assert relative_error(parts, whole) < 1e-6


def test_a_mean_takes_nothing_from_the_prefix_cache_and_a_last_state_does(engine: Engine) -> None:
    def hits() -> int:
        return engine.stats().prefix_hits_total

    embed(engine, (PROMPTS[4], LAST))
    assert hits() == 0
    (again,) = embed(engine, (PROMPTS[4], MEAN))
    assert hits() == 0
    embed(engine, (PROMPTS[4], LAST))
    assert hits() == 96
    (third,) = embed(engine, (PROMPTS[4], MEAN))
    assert torch.equal(again, third)


def test_fewer_dimensions_are_the_first_ones_at_length_one(
    engine: Engine, hidden: list[torch.Tensor]
) -> None:
    for pooling in (PoolingParams("last", 10), PoolingParams("mean", 1), PoolingParams("last", 48)):
        (vector,) = embed(engine, (PROMPTS[1], pooling))
        assert vector.shape == (pooling.dimensions,)
        assert relative_error(vector, expected(hidden[1], pooling)) < 1e-5
    for dimensions in (0, 49):
        with pytest.raises(InvalidArgument, match=f"'dimensions' is {dimensions}; allowed: 1 to 48"):
            engine.make_request("r", PROMPTS[1], embed=PoolingParams("last", dimensions))


def test_those_that_generate_beside_it_are_left_alone(engine: Engine, hidden: list[torch.Tensor]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    alone = [done.outputs[0] for done in engine.generate(PROMPTS, greedy)]
    deltas: dict[str, list[TextDelta]] = {}
    for number, prompt in enumerate(PROMPTS):
        for request in (
            engine.make_request(f"g{number}", prompt, greedy),
            engine.make_request(f"m{number}", prompt, embed=MEAN),
            engine.make_request(f"l{number}", prompt, embed=LAST),
        ):
            engine.add(request, deltas.setdefault(request.id, []).append)
    finish(engine)
    for number, output in enumerate(alone):
        generated = deltas[f"g{number}"]
        assert [token for delta in generated for token in delta.token_ids] == output.token_ids
        logprobs = [entry[0].logprob for delta in generated for entry in delta.logprobs]
        assert logprobs == pytest.approx([entry[0].logprob for entry in output.logprobs], abs=1e-4)
        for name, pooling in (("m", MEAN), ("l", LAST)):
            (delta,) = deltas[f"{name}{number}"]
            vector = torch.tensor(delta.embedding, dtype=torch.float64)
            assert relative_error(vector, expected(hidden[number], pooling)) < 1e-5


def test_one_that_is_aborted_between_chunks_leaves_nothing(folder: Path, hidden: list[torch.Tensor]) -> None:
    engine = build(folder, max_num_batched_tokens=8)
    deltas: list[TextDelta] = []
    engine.add(engine.make_request("r", PROMPTS[4], embed=MEAN), deltas.append)
    for _ in range(3):
        engine.step()
    engine.abort("r")
    (vector,) = embed(engine, (PROMPTS[3], MEAN))
    assert relative_error(vector, expected(hidden[3], MEAN)) < 1e-5
    assert engine.stats().num_used_blocks == 0
    assert list(engine._executor._pooler._prompts) == [2]  # its row goes with the next plan
    embed(engine, ([5], LAST))
    assert list(engine._executor._pooler._prompts) == [3]


def test_a_prompt_may_fill_the_model(folder: Path, hidden: list[torch.Tensor]) -> None:
    engine = build(folder, max_model_len=len(LONG), max_num_batched_tokens=16, num_gpu_blocks_override=7)
    (vector,) = embed(engine, (LONG, LAST))
    assert relative_error(vector, expected(hidden[4], LAST)) < 1e-5
    with pytest.raises(PromptTooLong, match=r"the prompt has 100 tokens; max_model_len is 99$"):
        engine.make_request("r", [*LONG, 7], embed=LAST)
    with pytest.raises(PromptTooLong, match="at most 98 fit beside one new token"):
        engine.make_request("r", LONG)


def test_states_that_are_no_numbers_end_their_own_request_and_are_not_reused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas: list[TextDelta] = []
    engine.add(engine.make_request("bad", PROMPTS[4], embed=LAST), deltas.append)
    run = engine._executor._runner.run
    with monkeypatch.context() as patch:
        patch.setattr(engine._executor._runner, "run", lambda inputs: run(inputs) * math.nan)
        finish(engine)
    (delta,) = deltas
    assert isinstance(delta.error, StepFailed)
    assert "no numbers" in str(delta.error)
    assert engine.stats().num_cached_blocks == 0


def test_a_vector_is_brought_to_length_one() -> None:
    assert embedding_of((3.0, 4.0), None) == (0.6, 0.8)
    assert embedding_of((3.0, 4.0, 12.0), 2) == (0.6, 0.8)
    assert embedding_of((0.0, 0.0), None) == (0.0, 0.0)
    assert embedding_of((1.0, math.nan), None) is None
    assert embedding_of((1.0, math.inf), None) is None
