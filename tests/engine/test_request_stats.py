"""Where a request's time went, what the cache spared it, and how often it was thrown out."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Engine, SamplingParams
from octavo.errors import Cancelled, DeadlineExceeded, OctavoError
from octavo.protocol import StepPlan
from octavo.request import RequestStats, TextDelta
from tiny_engine import tiny_engine, whole

PROMPT = [3 + (i * i) % 250 for i in range(70)]


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 64}
    with whole(tiny_engine(folder, **sizes)) as engine:
        yield engine


def run(engine: Engine, id: str, max_tokens: int = 5, n: int = 1, late_s: float = 0.0) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n)
    request = engine.make_request(id, PROMPT, params, arrived_s=time.monotonic() - late_s)
    engine.add(request, deltas.append)
    while engine.has_work:
        engine.step()
    return deltas


def stats_of(deltas: list[TextDelta]) -> RequestStats:
    """Of the last delta, which alone has them."""
    assert [delta for delta in deltas if delta.stats] == deltas[-1:]
    stats = deltas[-1].stats
    assert stats is not None
    return stats


def test_times_add_up_to_that_from_arrival_to_end(engine: Engine) -> None:
    started_s = time.monotonic()
    stats = stats_of(run(engine, "r", max_tokens=20, late_s=0.75))
    took_s = time.monotonic() - started_s
    assert 0.75 <= stats.queue_s < 0.75 + took_s
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert 0.75 <= stats.queue_s + stats.prefill_s + stats.decode_s <= 0.75 + took_s
    assert (stats.cached_prompt_tokens, stats.preemptions, stats.accepted_draft_tokens) == (0, 0, 0)


def test_time_in_line_is_queue_time(engine: Engine) -> None:
    deltas: list[TextDelta] = []
    started: list[float] = []
    take = engine._scheduler._admission.take
    engine._scheduler._admission.take = lambda *_: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add(
        engine.make_request("r", PROMPT, params), deltas.append, lambda: started.append(time.monotonic())
    )
    added_s = time.monotonic()
    while time.monotonic() - added_s < 0.1:
        assert not engine.step()
    assert started == []
    engine._scheduler._admission.take = take  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert len(started) == 1
    stats = stats_of(deltas)
    assert 0.1 <= stats.queue_s < 0.3
    assert stats.queue_s == pytest.approx(started[0] - added_s, abs=0.01)


def test_prompt_tokens_from_the_cache_are_counted(engine: Engine) -> None:
    assert stats_of(run(engine, "first")).cached_prompt_tokens == 0
    assert stats_of(run(engine, "second", n=3)).cached_prompt_tokens == 64  # four full blocks


@pytest.mark.parametrize("n", [1, 3])
def test_preemptions_are_counted_and_change_no_other_number(engine: Engine, n: int) -> None:
    scheduler, count = engine._scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def schedule_after_preempting() -> StepPlan | None:
        if next(count) % 5 == 0 and scheduler._running:
            scheduler._preempt(scheduler._running.pop())
        return schedule()

    scheduler.schedule = schedule_after_preempting  # type: ignore[method-assign]
    stats = stats_of(run(engine, "r", max_tokens=15, n=n))
    assert stats.preemptions == engine.stats().preemptions_total > 1
    assert stats.cached_prompt_tokens == 0


@pytest.mark.parametrize("kind", [Cancelled, DeadlineExceeded])
def test_a_request_that_is_given_up_frees_its_blocks_and_has_no_statistics(
    engine: Engine, kind: type[OctavoError]
) -> None:
    deltas: list[TextDelta] = []
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine.add(engine.make_request("r", PROMPT, params), deltas.append)
    for _ in range(5):
        engine.step()
    assert engine.stats().num_used_blocks > 0
    assert engine.abort("r", kind("too late"))
    assert engine.stats().num_used_blocks == 0
    assert (deltas[-1].stats, str(deltas[-1].error)) == (None, "too late")
    assert engine.stats().requests_finished == {"abort": 1}
