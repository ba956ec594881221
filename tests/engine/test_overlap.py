"""A step's tokens are delivered while the next step is under way: nothing else may change by that."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import Engine, SamplingParams
from octavo.engine.offline import Completion
from octavo.errors import Cancelled, StepFailed, Unavailable
from octavo.protocol import BlockFile, Executor, StepPlan, StepResult
from octavo.request import TextDelta
from tiny import EOS
from tiny_engine import tiny_engine

PROMPTS = [[7], [9, 30, 31], list(range(5, 22)), list(range(40, 80)), [3 + (i * i) % 250 for i in range(99)]]


class ThreadedExecutor:
    """Computes on a thread of its own, as a device does. Writes down when what happens."""

    def __init__(self, inner: Executor, log: list[str]) -> None:
        self._inner = inner
        self._log = log
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[StepResult | StepFailed] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.fail_in_submit = False

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def submit(self, plan: StepPlan) -> None:
        self._log.append(f"submit {plan.step_id}")
        if self.fail_in_submit:
            raise StepFailed("the device is gone")
        self._plans.put(plan)

    def collect(self) -> StepResult:
        outcome = self._outcomes.get(timeout=30)
        if isinstance(outcome, StepFailed):
            raise outcome
        self._log.append(f"collect {outcome.step_id}")
        return outcome

    @property
    def num_host_blocks(self) -> int:
        return self._inner.num_host_blocks

    def close(self, keep: Iterable[BlockFile] = (), discards: Iterable[str] = ()) -> None:
        self._plans.put(None)
        self._thread.join()
        self._inner.close(keep, discards)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._inner.submit(plan)
            try:
                self._outcomes.put(self._inner.collect())
            except StepFailed as error:
                self._outcomes.put(error)


class Overlapped:
    """An engine on a `ThreadedExecutor`, and what happened in it, deliveries included."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.engine = tiny_engine(folder, **arguments)
        self.log: list[str] = []
        self.executor = ThreadedExecutor(self.engine._executor, self.log)
        self.engine._executor = self.executor  # type: ignore[assignment]
        self.deltas: dict[str, list[TextDelta]] = {}

    def add(self, id: str, prompt: list[int], **params: Any) -> list[TextDelta]:
        deltas = self.deltas[id] = []

        def take(delta: TextDelta) -> None:
            self.log.append(f"deliver {id}{'.' if delta.request_finished else ''}")
            deltas.append(delta)

        sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, **params})
        self.engine.add(self.engine.make_request(id, prompt, sampling), take)
        return deltas


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Overlapped]]:
    """`make(**engine_arguments)`. Each must be idle and whole at the end."""
    made: list[Overlapped] = []

    def build(**arguments: Any) -> Overlapped:
        made.append(Overlapped(folder, **arguments))
        return made[-1]

    yield build
    for run in made:
        run.engine.check_integrity()
        used = run.engine.stats().num_used_blocks
        run.engine.close()
        assert used == 0


def at_once(engine: Engine) -> Engine:
    """Delivers every step's tokens before anything else happens."""
    step = engine.step

    def step_and_deliver() -> bool:
        more = step()
        engine._deliver_outputs()
        return more

    engine.step = step_and_deliver  # type: ignore[method-assign]
    return engine


def said(completion: Completion) -> list[tuple[list[int], str, str | None]]:
    return [(o.token_ids, o.text, o.finish_reason) for o in completion.outputs]


def logprobs_of(completion: Completion) -> list[float]:
    """All of them; they depend on the batch by a rounding."""
    return [entry.logprob for o in completion.outputs for token in o.logprobs for entry in token]


def tokens(deltas: list[TextDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"block_size": 8, "max_model_len": 128, "num_gpu_blocks_override": 16},
    ],
    ids=["plain", "in chunks", "preempting"],
)
def test_outputs_are_the_same_with_and_without(
    folder: Path, make: Callable[..., Overlapped], arguments: dict[str, Any]
) -> None:
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    reference = at_once(tiny_engine(folder, **arguments))
    text = reference.generate([PROMPTS[3]], SamplingParams(**greedy))[0].text
    last = reference.generate([PROMPTS[1]], SamplingParams(**greedy))[0].outputs[0].token_ids[5]
    each = [
        SamplingParams(**greedy, stop=(text[6:9], "never")),
        SamplingParams(**greedy, stop_token_ids=(last,), min_tokens=2, logprobs=2),
        SamplingParams(temperature=1.5, seed=5, max_tokens=30, n=3, stop=("a", "e"), min_tokens=4),
        SamplingParams(temperature=2, seed=6, max_tokens=60, logprobs=0),
        SamplingParams(**greedy, n=2, stop=(text[6:9],), include_stop_str_in_output=True),
    ]
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    expected = reference.generate(prompts, each)
    run = make(**arguments)
    for engine in (run.engine, tiny_engine(folder, **arguments)):
        got = engine.generate(prompts, each)
        assert [said(c) for c in got] == [said(c) for c in expected]
        assert [logprobs_of(c) for c in got] == [pytest.approx(logprobs_of(c), rel=1e-4) for c in expected]
        assert engine.stats().requests_finished["stop"] >= 3
    assert [o.finish_reason for o in expected[0].outputs] == ["stop"]
    assert (reference.stats().preemptions_total > 0) == ("block_size" in arguments)


def test_a_step_is_under_way_while_the_one_before_is_delivered(make: Callable[..., Overlapped]) -> None:
    run = make()
    run.add("a", PROMPTS[2], max_tokens=3)
    while run.engine.has_work:
        run.engine.step()
    assert run.log == [
        "submit 1",
        "collect 1",
        "submit 2",
        "deliver a",
        "collect 2",
        "submit 3",
        "deliver a",
        "collect 3",
        "deliver a.",
    ]


def test_an_executor_that_computes_on_this_thread_does_so_after_the_delivery(folder: Path) -> None:
    engine = tiny_engine(folder)
    events: list[str] = []
    run = engine._executor._runner.run
    engine._executor._runner.run = lambda inputs: events.append("forward") or run(inputs)  # type: ignore
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add(engine.make_request("a", PROMPTS[2], params), lambda _: events.append("deliver"))
    while engine.has_work:
        engine.step()
    assert events == ["forward", "deliver"] * 3


def test_a_stop_string_is_found_a_step_late_and_that_step_s_token_is_ignored(
    make: Callable[..., Overlapped],
) -> None:
    run = make()
    plain = run.add("plain", PROMPTS[3], max_tokens=20)
    while run.engine.has_work:
        run.engine.step()
    text = "".join(delta.text for delta in plain)
    before = run.engine.stats().generation_tokens_total
    run.log.clear()
    stopped = run.add("stopped", PROMPTS[3], max_tokens=20, stop=(text[6:9],))
    while run.engine.has_work:
        run.engine.step()
    count = len(tokens(stopped))
    assert tokens(stopped) == tokens(plain)[:count]
    assert stopped[-1].finish_reason == "stop"
    assert run.engine.stats().generation_tokens_total - before == count
    assert len([event for event in run.log if event.startswith("collect")]) == count + 1
    assert run.log[-2:] == ["deliver stopped.", f"collect {20 + count + 1}"]


def test_a_request_aborted_between_two_steps_ends_once_and_its_last_tokens_are_dropped(
    make: Callable[..., Overlapped],
) -> None:
    run = make()
    gone, kept = run.add("gone", PROMPTS[1], max_tokens=9), run.add("kept", PROMPTS[2], max_tokens=9)
    for _ in range(3):
        run.engine.step()
    assert run.engine.abort("gone")
    while run.engine.has_work:
        run.engine.step()
    assert isinstance(gone[-1].error, Cancelled)
    assert len(tokens(gone)) == 2
    assert len(tokens(kept)) == 9
    assert run.log.count("deliver gone.") == 1


def test_what_is_aborted_after_its_last_token_was_computed_leaves_no_work(
    make: Callable[..., Overlapped],
) -> None:
    run = make()
    deltas = run.add("r", PROMPTS[1], max_tokens=1)
    run.engine.step()
    assert run.engine.has_work
    assert run.engine.abort("r")
    assert not run.engine.has_work
    assert not run.engine.step()
    assert [type(delta.error) for delta in deltas] == [Cancelled]


def test_abort_all_leaves_out_what_is_done(make: Callable[..., Overlapped]) -> None:
    run = make()
    done, open_ = run.add("done", PROMPTS[1], max_tokens=1), run.add("open", PROMPTS[2], max_tokens=5)
    run.engine.step()
    run.engine.abort_all(Unavailable("the end"))
    assert [delta.finish_reason for delta in done] == ["length"]
    assert [len(delta.token_ids) for delta in open_] == [1, 0]
    assert isinstance(open_[-1].error, Unavailable)
    assert run.engine.stats().requests_finished == {"length": 1, "error": 1}


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_tokens_from_before_a_step_that_fails_are_delivered_before_its_error(
    make: Callable[..., Overlapped], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = make()
    deltas = run.add("r", PROMPTS[1], max_tokens=9)
    run.engine.step()
    with monkeypatch.context() as patch:
        if where == "submit":
            patch.setattr(run.executor, "fail_in_submit", True)
        else:
            patch.setattr(run.executor._inner._runner, "run", lambda *_: 1 / 0)  # type: ignore[attr-defined]
        assert run.engine.step()
    assert [len(delta.token_ids) for delta in deltas] == [1, 0]
    assert isinstance(deltas[-1].error, StepFailed)
    assert not run.engine.has_work
    again = run.add("again", PROMPTS[1], max_tokens=2)
    while run.engine.has_work:
        run.engine.step()
    assert tokens(again)[0] == tokens(deltas)[0]


def test_an_interrupted_delivery_leaves_no_step_in_flight(folder: Path) -> None:
    engine = tiny_engine(folder)
    before = engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=4))[0].outputs
    request = engine.make_request("r", PROMPTS[1], SamplingParams(temperature=0, max_tokens=4))

    def interrupted(delta: TextDelta) -> None:
        if not delta.error:
            raise KeyboardInterrupt

    engine.add(request, interrupted)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("r")
    assert engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=4))[0].outputs == before


def test_the_end_of_sequence_token_ends_it_the_same_way(
    folder: Path, make: Callable[..., Overlapped]
) -> None:
    engine = at_once(tiny_engine(folder))
    hot = [SamplingParams(temperature=5, seed=seed, max_tokens=200) for seed in range(12)]
    expected = [said(c) for c in engine.generate([PROMPTS[0]] * 12, hot)]
    assert any(token_ids[-1] == EOS for ((token_ids, _, _),) in expected)
    assert [said(c) for c in make().engine.generate([PROMPTS[0]] * 12, hot)] == expected
