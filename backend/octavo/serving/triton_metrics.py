"""The engine's numbers as Triton metrics, under vLLM's names so that existing dashboards work.

Owned by the sender thread: it calls `update` about once a second and `observe` when a request is done. Every
value set is a round trip to the server, so nothing here runs on the engine's thread. `pb_utils.MetricFamily`
is passed in; a server without custom metrics, or one that has them switched off, costs one log line.
"""

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.engine.metrics import EngineStats
from octavo.serving.outbox import OpenRequest

log = logging.getLogger("octavo")

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Sequences in the batch.", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Requests that wait for their first step.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "KV blocks in use by sequences; 1 is all of them.",
        lambda s: s.num_used_blocks / s.num_blocks,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:prompt_tokens_total": ("Prompt tokens of accepted requests.", lambda s: s.prompt_tokens_total),
    "vllm:generation_tokens_total": ("Tokens generated.", lambda s: s.generation_tokens_total),
    "vllm:num_preemptions_total": (
        "Sequences put back for want of KV blocks.",
        lambda s: s.preemptions_total,
    ),
    "vllm:prefix_cache_queries_total": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries_total,
    ),
    "vllm:prefix_cache_hits_total": ("Prompt tokens found there.", lambda s: s.prefix_hits_total),
}
_FINISHED = "vllm:request_success_total"
_REASONS = ("stop", "length", "abort", "error")
_COALESCED = "octavo:coalesced_responses_total"
_READY = "octavo:ready"
_TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
_TIME_PER_OUTPUT_TOKEN = "vllm:time_per_output_token_seconds"
_LATENCY = "vllm:e2e_request_latency_seconds"
_HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    _TIME_TO_FIRST_TOKEN: (
        "From the request's arrival to its first token being sent.",
        [0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40],
    ),
    _TIME_PER_OUTPUT_TOKEN: (
        "A request's mean time from one token of a sequence to the next.",
        [0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5],
    ),
    _LATENCY: (
        "From the request's arrival to its final response being sent.",
        [0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120],
    ),
}


@dataclass(slots=True)
class _Counter:
    """Triton's counters grow by increments; the engine gives totals."""

    metric: Any
    exported: float = 0

    def raise_to(self, total: float) -> None:
        if total > self.exported:
            self.metric.increment(total - self.exported)
            self.exported = total


def _keep(server_object: Any) -> Any:
    """Keeps an object from ever being destroyed, when the interpreter ends included.

    Destroying a metric or a family takes the series of its name and labels out of the server, whoever else
    still writes to them: another model, or the instance that replaces this one in a reload, which then writes
    to freed memory (seen to corrupt the heap of a 24.10 server).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server_object))
    return server_object


@dataclass(frozen=True, slots=True)
class _Family:
    family: Any

    def metric(self, **arguments: Any) -> Any:
        return _keep(self.family.Metric(**arguments))


class TritonMetrics:
    """Metrics of one model instance. `family` is `pb_utils.MetricFamily`, None where there is none.

    Counters and histograms of several instances add up in one series; gauges carry the instance's name.
    """

    def __init__(self, family: Any, model: str, version: str, instance: str) -> None:
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, _Counter] = {}
        self._finished: dict[str, _Counter] = {}
        self._histograms: dict[str, Any] = {}
        labels = {"model": model, "version": version}
        try:
            if family is None:
                raise NotImplementedError("this server has no custom metrics")
            self._create(family, labels, {**labels, "instance": instance})
        except Exception as error:
            log.warning("no metrics of the engine: %s", error)
            for metrics in (self._gauges, self._counters, self._finished, self._histograms):
                metrics.clear()

    def update(self, stats: EngineStats, ready: bool, num_coalesced: int) -> None:
        """`num_coalesced`: the sender's total of that name."""
        for name, metric in self._gauges.items():
            metric.set(float(ready) if name == _READY else float(_GAUGES[name][1](stats)))
        for name, counter in self._counters.items():
            counter.raise_to(num_coalesced if name == _COALESCED else _COUNTERS[name][1](stats))
        for reason, counter in self._finished.items():
            counter.raise_to(stats.requests_finished.get(reason, 0))

    def observe(self, request: OpenRequest) -> None:
        """The latencies of a request whose final response was just sent."""
        first_s, last_s = request.first_token_s, request.last_token_s
        if not self._histograms or first_s is None or last_s is None or request.reply is None:
            return
        self._histograms[_LATENCY].observe(time.monotonic() - request.arrived_s)
        self._histograms[_TIME_TO_FIRST_TOKEN].observe(first_s - request.arrived_s)
        steps = request.num_tokens / request.reply.num_sequences - 1
        if steps > 0:
            self._histograms[_TIME_PER_OUTPUT_TOKEN].observe((last_s - first_s) / steps)

    def close(self) -> None:
        """Shows a model that is gone as idle and not ready. Its series stay; see `_keep`."""
        for metric in self._gauges.values():
            metric.set(0.0)

    def _create(self, family: Any, labels: dict[str, str], gauge_labels: dict[str, str]) -> None:
        def make(name: str, help: str, kind: Any) -> _Family:
            return _Family(_keep(family(name=name, description=help, kind=kind)))

        for name, (help, _) in _GAUGES.items():
            self._gauges[name] = make(name, help, family.GAUGE).metric(labels=gauge_labels)
        ready = make(_READY, "1 while the model takes requests, else 0.", family.GAUGE)
        self._gauges[_READY] = ready.metric(labels=gauge_labels)
        for name, (help, _) in _COUNTERS.items():
            self._counters[name] = _Counter(make(name, help, family.COUNTER).metric(labels=labels))
        coalesced = make(
            _COALESCED, "Deltas of streams that were sent in an earlier one's response.", family.COUNTER
        )
        self._counters[_COALESCED] = _Counter(coalesced.metric(labels=labels))
        finished = make(_FINISHED, "Requests that ended, by how.", family.COUNTER)
        for reason in _REASONS:
            self._finished[reason] = _Counter(finished.metric(labels={**labels, "finished_reason": reason}))
        if not hasattr(family, "HISTOGRAM"):
            log.info("no latency histograms: this server's metrics have none")
            return
        for name, (help, buckets) in _HISTOGRAMS.items():
            histogram = make(name, help, family.HISTOGRAM)
            self._histograms[name] = histogram.metric(labels=labels, buckets=buckets)
