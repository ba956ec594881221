"""One load test: hands out requests and their times, asks them through the link, and keeps what came of
them.

`locustfile.py` owns one at a time and does all that concerns Locust; nothing here imports it. The methods
are called from its greenlets.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import load_arrivals
from load_link import Answer, Link
from load_slo import Slo
from load_stats import NOT_SENT, UNFINISHED, Record, Tally, record
from load_timeline import Moment
from load_workloads import Recorded, Shortened, Workload, parse

TRANSPORTS = ("grpc", "http", "openai")
# Told of each request that ended: what is kept of it, the answer, and the error's text.
OnDone = Callable[[Record, Answer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do. Raises ValueError, which names the option, for what cannot be done."""

    transports: tuple[str, ...] = ("grpc",)
    urls: Mapping[str, str]
    metrics_url: str | None = None
    model: str = "llm"
    workload: str = "chat"
    arrivals: str = "closed"
    rate_per_s: float = 1.0
    burst_size: int = 8
    max_in_flight: int = 256
    max_tokens: int | None = None
    seed: int = 0
    timeout_s: float = 300.0
    slo: Slo = field(default_factory=Slo)
    steps: tuple[int, ...] = ()
    step_s: float = 20.0

    def __post_init__(self) -> None:
        bounds = {
            "--rate": (self.rate_per_s, 0.001, 100_000, "requests a second"),
            "--burst-size": (self.burst_size, 1, 10_000, "requests at once"),
            "--max-in-flight": (self.max_in_flight, 1, 10_000, "requests"),
            "--request-timeout": (self.timeout_s, 0.1, 86_400, "seconds"),
            "--step-seconds": (self.step_s, 1, 86_400, "seconds"),
            "--max-tokens": (1 if self.max_tokens is None else self.max_tokens, 1, 100_000, "tokens"),
        }
        for name, (value, least, most, unit) in bounds.items():
            if not least <= value <= most:
                raise ValueError(f"{name} is {value:g}; allowed: {least:g} to {most:g} {unit}")
        if self.arrivals not in load_arrivals.KINDS:
            raise ValueError(f"--arrivals {self.arrivals!r}; allowed: {', '.join(load_arrivals.KINDS)}")
        if self.steps and self.arrivals != "closed":
            raise ValueError(
                "--steps raises the number of users, which means something in a closed loop only"
            )
        if any(not 1 <= users <= 10_000 for users in self.steps):
            raise ValueError("--steps: allowed are numbers of users from 1 to 10000, as in 1,2,4,8")

    def load(self) -> Workload:
        """The workload, its file read. Raises ValueError and OSError."""
        workload = parse(self.workload, self.seed)
        if self.arrivals == "trace":
            if not isinstance(workload, Recorded):
                raise ValueError("--arrivals trace needs --workload FILE.jsonl, whose lines say 'at_s'")
            for _ in load_arrivals.trace(workload.jobs):
                pass
        return workload if self.max_tokens is None else Shortened(workload, self.max_tokens)


class Session:
    """Begins when it is made. Raises ValueError for a URL that is none."""

    def __init__(self, plan: Plan, workload: Workload, on_done: OnDone) -> None:
        self.plan = plan
        self.moments: list[Moment] = []
        self.most_in_flight = 0
        self.in_flight = 0
        self.stopping = threading.Event()
        self._workload = workload
        self._on_done = on_done
        self._next_index = 0
        self.tally = Tally(plan.slo, time.monotonic())  # there before the link tells of anything
        self.link = Link(plan.urls, plan.model, plan.timeout_s, plan.metrics_url, self._keep)
        self.tally.begin_s = time.monotonic()
        self._times = self._arrivals()

    def ask(self, transport: str) -> bool:
        """The next request of a closed loop, to its end: whether it succeeded."""
        return self._ask(transport, self._take(), None)

    def next_due_s(self) -> float | None:
        """When the next request of an open loop is due, by `time.monotonic()`; None after the last one."""
        offset_s = next(self._times, None)
        return None if offset_s is None else self.tally.begin_s + offset_s

    def send_due(self, transport: str, due_s: float, spawn: Callable[[Callable[[], object]], object]) -> None:
        """The next request of an open loop, in a greenlet of its own, unless too many run."""
        index = self._take()
        if self.in_flight >= self.plan.max_in_flight:
            job = self._workload.job(index)
            self.tally.add(Record(transport, job.workload, due_s, error=NOT_SENT))
            return
        spawn(lambda: self._ask(transport, index, due_s))

    def stop(self) -> None:
        """No more requests; those that run may end."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.tally.end(time.monotonic())

    def close(self) -> None:
        self.stop()
        self.link.close()

    def _take(self) -> int:
        index = self._next_index
        self._next_index += 1
        return index

    def _ask(self, transport: str, index: int, due_s: float | None) -> bool:
        job = self._workload.job(index)
        begun_s = time.monotonic()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        answer = None
        try:
            answer = self.link.ask(transport, job)
        finally:
            self.in_flight -= 1
            if answer is None:  # this greenlet is killed, or the sender is lost
                due_s = begun_s if due_s is None else due_s
                self.tally.add(Record(transport, job.workload, due_s, time.monotonic(), error=UNFINISHED))
        done = record(transport, job.workload, due_s, answer, self.plan.slo)
        self.tally.add(done, answer)
        self._on_done(done, answer)
        return done.error is None

    def _arrivals(self) -> Iterator[float]:
        plan = self.plan
        if plan.arrivals == "poisson":
            return load_arrivals.poisson(plan.rate_per_s, plan.seed)
        if plan.arrivals == "bursts":
            return load_arrivals.bursts(plan.rate_per_s, plan.burst_size, plan.seed)
        if plan.arrivals == "trace":
            return load_arrivals.trace(_recorded(self._workload))
        return iter(())

    def _keep(self, at_s: float, values: Mapping[str, float]) -> None:
        self.moments.append(Moment(round(at_s - self.tally.begin_s, 3), values))


def _recorded(workload: Workload) -> Sequence:
    inner = workload.workload if isinstance(workload, Shortened) else workload
    assert isinstance(inner, Recorded)  # `Plan.load` has seen to it
    return inner.jobs
