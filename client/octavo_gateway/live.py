"""The engine as the page shows it: from a server's metrics to one small JSON object, twice a second.

`Readings` turns metrics into numbers and knows no network. `Broadcast` fetches them, once for all who look
and not at all when nobody does; `page.py` is its only caller.
"""

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from octavo_client import Metrics, OctavoError, Sample

log = logging.getLogger("octavo.gateway")

INTERVAL_S = 0.5  # from one snapshot to the next
MOST_VIEWERS = 64
_RECENT_S = 30.0  # what is a mean of requests is one of those that ended so recently
# Servers refresh their counters about once a second, so a rate is one between two refreshes.
_REFRESH_S = 1.0
_RATE_OVER_S = 2.5
_STOPPED_AFTER_S = 2.0

_Groups = dict[tuple[str, str], dict[str, list[Sample]]]  # by model and version, then by name


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV blocks by what they are to sequences; the last four add up to the first."""

    total: int
    free: int  # nothing in them can be reused
    cached: int  # held by no sequence, but a prompt with the same prefix can reuse them
    referenced: int  # held by one sequence
    shared: int  # held by several


@dataclass(frozen=True, slots=True)
class Instance:
    name: str
    running: int
    waiting: int
    blocks: Blocks | None  # where the server counts them


@dataclass(frozen=True, slots=True)
class Model:
    """One model's numbers; None where there is nothing to say yet, or the server does not tell."""

    name: str
    version: str
    ready: bool | None
    instances: tuple[Instance, ...]
    block_size: int | None  # tokens
    tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_s: float | None  # mean of the requests that ended in the last half minute, as is `queue_s`
    queue_s: float | None
    prefix_hit_rate: float | None  # of the prompt tokens looked up in the last half minute
    prefix_hit_rate_total: float | None  # since the server's start
    preemptions: int


@dataclass(frozen=True, slots=True)
class View:
    """What one event of `/live` carries. `error` is for people, and stands alone."""

    models: tuple[Model, ...] = ()
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


class Rate:
    """How fast a counter grows that is read more often than it is refreshed."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, float]] = deque()  # when it had grown, and to what

    def add(self, now_s: float, total: float) -> float:
        """Per second. A counter that falls belongs to a server that was started anew."""
        changes = self._changes
        if not changes or total < changes[-1][1]:
            changes.clear()
            changes.append((now_s, total))
        elif total > changes[-1][1]:
            last_s, last = changes[-1]
            if now_s - last_s > _STOPPED_AFTER_S:  # it stood still, and went on within the last refresh
                changes.clear()
                changes.append((now_s - _REFRESH_S, last))
            changes.append((now_s, total))
        while len(changes) > 2 and changes[1][0] <= now_s - _RATE_OVER_S:
            changes.popleft()
        (first_s, first), (last_s, last) = changes[0], changes[-1]
        if last_s == first_s or now_s - last_s > _STOPPED_AFTER_S:
            return 0.0
        return (last - first) / (last_s - first_s)


class Recent:
    """By how much counters have grown in the last half minute."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now_s: float, totals: Mapping[str, float]) -> Mapping[str, float]:
        past = self._past
        if past and any(totals[name] < past[-1][1].get(name, 0.0) for name in totals):
            past.clear()  # started anew
        past.append((now_s, totals))
        while len(past) > 2 and past[1][0] <= now_s - _RECENT_S:
            past.popleft()
        before = past[0][1]
        return {name: total - before.get(name, 0.0) for name, total in totals.items()}


_RECENT_TOTALS = (
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_queue_time_seconds_count",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
)


class _Memory:
    """What is kept of one model from one reading to the next."""

    def __init__(self) -> None:
        self.tokens = Rate()
        self.prompt_tokens = Rate()
        self.recent = Recent()


class Readings:
    """Written by one task."""

    def __init__(self) -> None:
        self._memories: defaultdict[tuple[str, str], _Memory] = defaultdict(_Memory)

    def add(self, now_s: float, metrics: Metrics) -> View:
        """`now_s` is of any clock that goes forward. Models are those that say how many sequences run."""
        groups: _Groups = defaultdict(lambda: defaultdict(list))
        for sample in metrics:
            if "model" in sample.labels and not math.isnan(sample.value):
                key = sample.labels["model"], sample.labels.get("version", "")
                groups[key][sample.name].append(sample)
        engines = {key: series for key, series in groups.items() if "vllm:num_requests_running" in series}
        for gone in self._memories.keys() - engines.keys():
            del self._memories[gone]
        return View(tuple(self._model(now_s, *key, series) for key, series in sorted(engines.items())))

    def _model(self, now_s: float, name: str, version: str, series: dict[str, list[Sample]]) -> Model:
        memory = self._memories[name, version]
        recent = memory.recent.add(now_s, {total: _sum(series, total) or 0.0 for total in _RECENT_TOTALS})
        ready = _sum(series, "octavo:ready")
        sizes = [
            sample.value
            for sample in series.get("nv_trt_llm_kv_cache_block_metrics", ())
            if sample.labels.get("kv_cache_block_type") == "tokens_per" and sample.value > 0
        ]
        return Model(
            name=name,
            version=version,
            ready=None if ready is None else ready > 0,
            instances=_instances(series),
            block_size=int(sizes[0]) if sizes else None,
            tokens_per_s=memory.tokens.add(now_s, _sum(series, "vllm:generation_tokens_total") or 0.0),
            prompt_tokens_per_s=memory.prompt_tokens.add(
                now_s, _sum(series, "vllm:prompt_tokens_total") or 0.0
            ),
            first_token_s=_mean(recent, "vllm:time_to_first_token_seconds"),
            queue_s=_mean(recent, "vllm:request_queue_time_seconds"),
            prefix_hit_rate=_ratio(
                recent["vllm:prefix_cache_hits_total"], recent["vllm:prefix_cache_queries_total"]
            ),
            prefix_hit_rate_total=_ratio(
                _sum(series, "vllm:prefix_cache_hits_total") or 0.0,
                _sum(series, "vllm:prefix_cache_queries_total") or 0.0,
            ),
            preemptions=int(_sum(series, "vllm:num_preemptions_total") or 0),
        )


def _sum(series: Mapping[str, list[Sample]], name: str) -> float | None:
    samples = series.get(name)
    return None if samples is None else sum(sample.value for sample in samples)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(recent: Mapping[str, float], histogram: str) -> float | None:
    return _ratio(recent[f"{histogram}_sum"], recent[f"{histogram}_count"])


def _instances(series: Mapping[str, list[Sample]]) -> tuple[Instance, ...]:
    """In the order of their names. A server without instances in its labels has one, without a name."""
    names = {sample.labels.get("instance", "") for sample in series["vllm:num_requests_running"]}

    def of(name: str, instance: str) -> int | None:
        values = [s.value for s in series.get(name, ()) if s.labels.get("instance", "") == instance]
        return int(sum(values)) if values else None

    def blocks(instance: str) -> Blocks | None:
        total, used = of("octavo:kv_blocks", instance), of("octavo:kv_blocks_used", instance)
        if total is None or used is None:
            return None
        # The gauges are not all read in one moment: what would not add up is cut off.
        used = min(used, total)
        shared = min(of("octavo:kv_blocks_shared", instance) or 0, used)
        cached = min(of("octavo:kv_blocks_reusable", instance) or 0, total - used)
        return Blocks(total, total - used - cached, cached, used - shared, shared)

    return tuple(
        Instance(
            name,
            of("vllm:num_requests_running", name) or 0,
            of("vllm:num_requests_waiting", name) or 0,
            blocks(name),
        )
        for name in sorted(names)
    )


class Broadcast:
    """One reader of metrics for any number of viewers. Belongs to one event loop."""

    def __init__(self, fetch: Callable[[], Awaitable[Metrics]], interval_s: float = INTERVAL_S) -> None:
        self.num_viewers = 0
        self._fetch = fetch
        self._interval_s = interval_s
        self._readings = Readings()
        self._latest = ""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return self.num_viewers >= MOST_VIEWERS

    async def views(self) -> AsyncGenerator[str, None]:
        """JSON as it comes, the newest only for one that is slow; for ever. Closing it is leaving."""
        self.num_viewers += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._read())
            while True:
                await self._news.wait()
                yield self._latest
        finally:
            self.num_viewers -= 1
            if self.num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _read(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                view = self._readings.add(time.monotonic(), await self._fetch())
            except OctavoError as error:
                view = View(error=error.message)
            except Exception:
                log.exception("the metrics could not be read")
                view = View(error="the gateway failed at reading the server's metrics; its log says why")
            self._latest = view.to_json()
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(max(self._interval_s - (time.monotonic() - started_s), 0.1))
