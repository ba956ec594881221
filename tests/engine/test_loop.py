"""The engine thread: every request ends in exactly one final delta, whatever happens around it."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.engine.loop import EngineLoop
from octavo.errors import Cancelled, InvalidArgument, OctavoError, Unavailable
from octavo.request import Request, TextDelta


class FakeEngine:
    """Runs each request for as many steps as it has prompt tokens, then finishes it."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[list[int], Any]] = {}
        self.threads: set[int] = set()
        self.broken: Exception | None = None
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request: Request, sink: Any, on_start: Any = None) -> None:
        if request.id == "bad":
            raise InvalidArgument("bad")
        if request.id == "bug":
            raise KeyError("bug")
        self.open[request.id] = ([len(request.prompt_token_ids)], sink)

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.broken:
            raise self.broken
        for request_id, (left, sink) in list(self.open.items()):
            left[0] -= 1
            if left[0] == 0:
                del self.open[request_id]
            sink(TextDelta(request_id, text="x", request_finished=left[0] == 0))
        if self.open:
            time.sleep(0.002)
        return True

    def abort(self, request_id: str, error: OctavoError | None = None) -> bool:
        entry = self.open.pop(request_id, None)
        if entry:
            entry[1](TextDelta(request_id, error=error or Cancelled("cancelled"), request_finished=True))
        return entry is not None

    def abort_all(self, error: OctavoError) -> None:
        for request_id in list(self.open):
            self.abort(request_id, error)

    answer_all = abort_all


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def loop(engine: FakeEngine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    loop.start()
    yield loop
    loop.stop(0)
    assert not loop._thread.is_alive()


class Sink:
    def __init__(self) -> None:
        self.deltas: queue.Queue[TextDelta] = queue.Queue()

    def __call__(self, delta: TextDelta) -> None:
        self.deltas.put(delta)

    def last(self) -> TextDelta:
        while not (delta := self.deltas.get(timeout=5)).request_finished:
            pass
        assert self.deltas.empty()
        return delta


def request(id: str, steps: int) -> Request:
    return Request(id, (1,) * steps)


def test_requests_of_many_threads_finish_on_the_engine_thread(loop: EngineLoop, engine: FakeEngine) -> None:
    sinks = [Sink() for _ in range(40)]
    threads = [
        threading.Thread(target=loop.submit, args=(request(f"r{i}", 1 + i % 5), sink))
        for i, sink in enumerate(sinks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sink.last().error is None for sink in sinks)
    assert len(engine.threads) == 1


def test_abort_ends_a_request_and_an_unknown_one_is_left_alone(loop: EngineLoop) -> None:
    sink = Sink()
    loop.submit(request("r", 100_000), sink)
    loop.abort("unknown")
    loop.abort("r")
    assert isinstance(sink.last().error, Cancelled)


def test_a_request_that_the_engine_refuses_gets_its_error(loop: EngineLoop) -> None:
    sink = Sink()
    loop.submit(request("bad", 1), sink)
    assert isinstance(sink.last().error, InvalidArgument)


def test_a_bug_in_adding_a_request_is_that_request_s_error_only(loop: EngineLoop) -> None:
    bug, next_one = Sink(), Sink()
    loop.submit(request("bug", 1), bug)
    loop.submit(request("r", 1), next_one)
    assert "could not be added: KeyError('bug')" in str(bug.last().error)
    assert next_one.last().error is None


def test_stop_lets_requests_in_flight_finish(loop: EngineLoop) -> None:
    sink = Sink()
    loop.submit(request("r", 50), sink)
    loop.stop(timeout_s=5)
    assert sink.last().error is None


def test_stop_answers_what_is_not_done_by_the_deadline_and_refuses_new_ones(loop: EngineLoop) -> None:
    sink, late = Sink(), Sink()
    loop.submit(request("r", 100_000), sink)
    start = time.monotonic()
    loop.stop(timeout_s=0.1)
    assert time.monotonic() - start < 2
    assert isinstance(sink.last().error, Unavailable)
    with pytest.raises(Unavailable, match="shutting down"):
        loop.submit(request("late", 1), late)
    assert late.deltas.empty()


def test_an_engine_that_breaks_answers_everyone_with_the_reason(loop: EngineLoop, engine: FakeEngine) -> None:
    sink = Sink()
    loop.submit(request("r", 100_000), sink)
    engine.broken = RuntimeError("the card fell off the bus")
    error = sink.last().error
    assert error is not None
    assert error.wire.startswith("[INTERNAL] the engine has failed")
    assert "the card fell off the bus" in str(error)
    loop._thread.join(5)
    assert loop.failure is error
    with pytest.raises(OctavoError, match="fell off the bus"):
        loop.submit(request("next", 1), Sink())


def test_an_idle_loop_does_not_spin(loop: EngineLoop, engine: FakeEngine) -> None:
    time.sleep(0.3)
    assert engine.steps <= 2


def test_alarms_ring_on_the_engine_thread_in_order_while_it_is_idle(loop: EngineLoop) -> None:
    rung: queue.Queue[tuple[str, float, str]] = queue.Queue()
    now = time.monotonic()
    for name, delay_s in (("c", 0.15), ("a", -1.0), ("b", 0.05)):
        loop.at(
            now + delay_s,
            lambda name=name: rung.put((name, time.monotonic() - now, threading.current_thread().name)),
        )
    calls = [rung.get(timeout=5) for _ in range(3)]
    assert [name for name, _, _ in calls] == ["a", "b", "c"]
    assert {thread for _, _, thread in calls} == {"octavo-engine"}
    for (_, at_s, _), due_s in zip(calls, (0.0, 0.05, 0.15), strict=True):
        assert due_s <= at_s < due_s + 0.2


def test_an_alarm_rings_between_steps_and_may_abort(loop: EngineLoop) -> None:
    sink = Sink()
    loop.submit(request("r", 100_000), sink)
    loop.at(time.monotonic() + 0.05, lambda: loop.abort("r", Unavailable("too late")))
    started_s = time.monotonic()
    error = sink.last().error
    assert 0.04 < time.monotonic() - started_s < 0.25
    assert str(error) == "too late"


def test_an_alarm_that_is_far_away_keeps_no_thread_awake(loop: EngineLoop, engine: FakeEngine) -> None:
    loop.at(time.monotonic() + 3600, lambda: None)
    time.sleep(0.3)
    assert engine.steps <= 3
