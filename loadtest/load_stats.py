"""A load test's numbers: what is kept of each request, and the figures made of them. No I/O, no Locust.

Times are those that a client sees, on the clock of `time.monotonic()`; tokens are counted by the server.

- time to first token (TTFT): to the first response with tokens, from when the request was due: in a closed
  loop when it was sent, in an open loop when it should have been sent, so that a late sender hides nothing;
- time per output token (TPOT): of a request, from its first to its last response, over its tokens but one;
- inter-token latency (ITL): between two responses with tokens, once a response, however many tokens it
  carries, so that a merged response is seen as the one pause that it is; `tokens_per_response` says how
  often that is;
- end to end (E2E): from when it was due to its end.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from load_link import Answer
from load_slo import Slo

UNFINISHED = "UNFINISHED"  # begun, and cut off at the test's end
NOT_SENT = "NOT_SENT"  # due, but the bound on requests in flight was reached
QUANTILES = (50, 90, 99)


class Histogram:
    """Numbers, each as often as it came, to four digits: memory grows with their range, not their count."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, value: float) -> None:
        self._counts[float(f"{value:.3e}")] += 1

    def update(self, other: "Histogram") -> None:
        self._counts.update(other._counts)

    def percentiles(self) -> dict[str, float | None]:
        """In ms, by the nearest rank; None of nothing."""
        ordered = sorted(self._counts.items())
        total, result = self._counts.total(), {}
        for percent in QUANTILES:
            wanted, reached = math.ceil(percent / 100 * total), 0
            result[f"p{percent}"] = None
            for value, count in ordered:
                reached += count
                if reached >= wanted:
                    result[f"p{percent}"] = round(value * 1000, 3)
                    break
        return result


def percentiles(values_s: Iterable[float]) -> dict[str, float | None]:
    """In ms, by the nearest rank; None of nothing."""
    ordered = sorted(values_s)
    return {
        f"p{percent}": round(ordered[math.ceil(percent / 100 * len(ordered)) - 1] * 1000, 3)
        if ordered
        else None
        for percent in QUANTILES
    }


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `ended_s` is None of one that was not sent. Times of a failed one count nowhere."""

    transport: str
    workload: str
    due_s: float
    ended_s: float | None = None
    late_s: float = 0.0  # sent after it was due
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    responses: int = 0
    good: bool = False
    error: str | None = None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.due_s


def record(transport: str, workload: str, due_s: float | None, answer: Answer, slo: Slo) -> Record:
    """Of an answer; `due_s` is None in a closed loop."""
    begin_s = answer.started_s if due_s is None else due_s
    times = answer.token_times_s
    ttft_s = times[0] - begin_s if times else None
    tpot_s = (
        (times[-1] - times[0]) / (answer.output_tokens - 1) if times and answer.output_tokens > 1 else None
    )
    return Record(
        transport=transport,
        workload=workload,
        due_s=begin_s,
        ended_s=answer.ended_s,
        late_s=answer.started_s - begin_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        responses=len(times),
        good=answer.error is None and slo.kept(ttft_s, tpot_s),
        error=answer.error[0] if answer.error else None,
    )


def gaps(answer: Answer) -> list[float]:
    times = answer.token_times_s
    return [later - sooner for sooner, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kind of request, of one step, or of all.

    Latencies (ms, by percentile) are of requests that succeeded. Rates count what happened inside the window:
    output tokens that arrived there, requests that ended there. `attained` is the share of good requests of
    all that were due; None where none was.
    """

    requests: int
    succeeded: int
    errors: dict[str, int]  # by code
    attained: float | None
    requests_per_s: float
    goodput_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_response: float | None
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    itl_ms: dict[str, float | None]
    e2e_ms: dict[str, float | None]
    late_ms: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Step:
    """A time in which so many users were to ask. `end_s` is None while it runs."""

    users: int
    begin_s: float
    end_s: float | None = None


@dataclass(slots=True)
class _Bucket:
    """The responses of one kind of request in one step."""

    itl: Histogram = field(default_factory=Histogram)
    tokens: Counter[int] = field(default_factory=Counter)  # by the second after the test's begin


class Tally:
    """Takes requests as they end. Memory: some 200 bytes each, for as long as a test runs."""

    def __init__(self, slo: Slo, begin_s: float) -> None:
        self.slo, self.begin_s = slo, begin_s
        self.end_s: float | None = None
        self.records: list[Record] = []
        self.steps: list[Step] = []
        self._buckets: dict[tuple[str, str, int], _Bucket] = {}

    def begin_step(self, users: int, now_s: float) -> None:
        self._end_step(now_s)
        self.steps.append(Step(users, now_s))

    def end(self, now_s: float) -> None:
        """The window closes; requests that run may still be added."""
        self._end_step(now_s)
        self.end_s = now_s

    def add(self, done: Record, answer: Answer | None = None) -> None:
        self.records.append(done)
        if answer is None or done.error is not None:
            return
        key = (done.transport, done.workload, self._step_at(done.due_s))
        bucket = self._buckets.setdefault(key, _Bucket())
        for gap_s in gaps(answer):
            bucket.itl.add(gap_s)
        for second, tokens in _spread(answer, self.begin_s):
            bucket.tokens[second] += tokens

    def figures(self, now_s: float, transport: str | None = None, workload: str | None = None) -> Figures:
        """Of all, or of what is named, over the whole window."""
        end_s = self.end_s or now_s
        chosen = [r for r in self.records if _is(r.transport, transport) and _is(r.workload, workload)]
        buckets = [
            bucket
            for (of_transport, of_workload, _), bucket in self._buckets.items()
            if _is(of_transport, transport) and _is(of_workload, workload)
        ]
        return _figures(chosen, buckets, self.begin_s, self.begin_s, end_s)

    def step_figures(self, index: int) -> Figures:
        """Of requests that were due in the step; rates are of what happened in it."""
        step = self.steps[index]
        end_s = step.end_s or math.inf
        chosen = [r for r in self.records if step.begin_s <= r.due_s < end_s]
        ended = [r for r in self.records if r.ended_s is not None and step.begin_s <= r.ended_s < end_s]
        own = [bucket for (_, _, of_step), bucket in self._buckets.items() if of_step == index]
        return _figures(
            chosen, own, self.begin_s, step.begin_s, end_s, ended=ended, tokens=self._buckets.values()
        )

    def kinds(self) -> list[tuple[str, str]]:
        return sorted({(r.transport, r.workload) for r in self.records})

    def tokens_by_second(self) -> list[tuple[float, float]]:
        """(seconds after the begin, output tokens that arrived in that second)."""
        total: Counter[int] = Counter()
        for bucket in self._buckets.values():
            total.update(bucket.tokens)
        last = math.floor((self.end_s or self.begin_s) - self.begin_s)
        return [(second + 0.5, float(total[second])) for second in range(last)]

    def failures(self) -> int:
        """Requests that were answered by an error."""
        return sum(r.error not in (None, UNFINISHED, NOT_SENT) for r in self.records)

    def _end_step(self, now_s: float) -> None:
        if self.steps and self.steps[-1].end_s is None:
            self.steps[-1] = Step(self.steps[-1].users, self.steps[-1].begin_s, now_s)

    def _step_at(self, moment_s: float) -> int:
        for index in range(len(self.steps) - 1, -1, -1):
            if self.steps[index].begin_s <= moment_s:
                return index
        return 0


def _is(value: str, wanted: str | None) -> bool:
    return wanted is None or value == wanted


def _spread(answer: Answer, begin_s: float) -> list[tuple[int, float]]:
    """Its tokens by the second in which they came: a response's share of them, since not every protocol says
    how many tokens a response carries."""
    if not answer.token_times_s:
        return []
    each = answer.output_tokens / len(answer.token_times_s)
    seconds = Counter(math.floor(time_s - begin_s) for time_s in answer.token_times_s)
    return [(second, count * each) for second, count in seconds.items()]


def _figures(
    records: Sequence[Record],
    buckets: Sequence[_Bucket],
    origin_s: float,
    begin_s: float,
    end_s: float,
    *,
    ended: Sequence[Record] | None = None,
    tokens: Iterable[_Bucket] | None = None,
) -> Figures:
    succeeded = [r for r in records if r.error is None]
    inside = [
        r for r in (records if ended is None else ended) if r.ended_s is not None and r.ended_s <= end_s
    ]
    duration_s = max(end_s - begin_s, 1e-9)
    itl = Histogram()
    for bucket in buckets:
        itl.update(bucket.itl)
    # Whole seconds: the first and the last one of a step count by the part that lies in it.
    arrived = sum(
        count * max(0.0, min(origin_s + second + 1, end_s) - max(origin_s + second, begin_s))
        for bucket in (buckets if tokens is None else tokens)
        for second, count in bucket.tokens.items()
    )
    output_tokens, responses = sum(r.output_tokens for r in succeeded), sum(r.responses for r in succeeded)
    return Figures(
        requests=len(records),
        succeeded=len(succeeded),
        errors=dict(Counter(r.error for r in records if r.error is not None)),
        attained=round(sum(r.good for r in records) / len(records), 4) if records else None,
        requests_per_s=round(sum(r.error is None for r in inside) / duration_s, 3),
        goodput_per_s=round(sum(r.good for r in inside) / duration_s, 3),
        output_tokens_per_s=round(arrived / duration_s, 2),
        prompt_tokens=sum(r.prompt_tokens for r in succeeded),
        output_tokens=output_tokens,
        tokens_per_response=round(output_tokens / responses, 2) if responses else None,
        ttft_ms=percentiles(r.ttft_s for r in succeeded if r.ttft_s is not None),
        tpot_ms=percentiles(r.tpot_s for r in succeeded if r.tpot_s is not None),
        itl_ms=itl.percentiles(),
        e2e_ms=percentiles(r.e2e_s for r in succeeded if r.e2e_s is not None),
        late_ms=percentiles(r.late_s for r in succeeded),
    )
