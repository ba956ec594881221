"""The engine's numbers as Triton metrics, under vLLM's names so that existing dashboards work.

The sender thread calls `update` about once a second and `observe` when a request is done; both only compute
values, which `defer` (the reporting thread) then writes, since each is a round trip to the server. What there
is stands in `metric_tables`. `pb_utils.MetricFamily` is passed in; a server without custom metrics, or one
that has them switched off, costs one log line.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.engine.metrics import EngineStats, Step
from octavo.serving.ended_request import EndedRequest
from octavo.serving.metric_tables import (
    COUNTERS,
    GAUGES,
    REQUEST_HISTOGRAMS,
    STEP_HISTOGRAMS,
    Series,
    Snapshot,
)

log = logging.getLogger("octavo")

MOST_STEPS_OBSERVED = 100  # of an update; of more, so many at equal distances stand for all
Defer = Callable[[Callable[[], object]], object]


@dataclass(slots=True)
class _Counter:
    """Triton's counters grow by increments; the engine gives totals."""

    series: Series[Snapshot]
    metric: Any
    exported: float = 0

    def increment_to(self, total: float) -> float:
        """By how much the metric has to grow."""
        missing = max(total - self.exported, 0)
        self.exported += missing
        return missing


def _keep(server_object: Any) -> Any:
    """Keeps an object from ever being destroyed, when the interpreter ends included.

    Destroying a metric or a family takes the series of its name and labels out of the server, whoever else
    still writes to them: another model, or the instance that replaces this one in a reload, which then writes
    to freed memory (seen to corrupt the heap of a 24.10 server).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server_object))
    return server_object


class TritonMetrics:
    """Metrics of one model instance. `family` is `pb_utils.MetricFamily`, None where there is none.

    Counters and histograms of several instances add up in one series; gauges carry the instance's name.
    """

    def __init__(
        self,
        family: Any,
        model: str,
        version: str,
        instance: str,
        defer: Defer = lambda write: write(),
        off: str | None = None,
    ) -> None:
        """`off` names what the operator switched them off with."""
        self._defer = defer
        self._gauges: list[tuple[Series[Snapshot], Any]] = []
        self._counters: list[_Counter] = []
        self._of_requests: list[tuple[Series[EndedRequest], Any]] = []
        self._of_steps: list[tuple[Series[Step], Any]] = []
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        if off is not None:
            log.info("no metrics of the engine: %s says so", off)
            return
        labels = {"model": model, "version": version}
        try:
            if family is None:
                raise NotImplementedError("this server has no custom metrics")
            self._create(family, labels, {**labels, "instance": instance})
        except Exception as error:
            log.warning("no metrics of the engine: %s", error)
            self._gauges, self._counters, self._of_requests, self._of_steps = [], [], [], []

    def update(self, stats: EngineStats, ready: bool, num_coalesced: int, steps: Iterable[Step] = ()) -> None:
        """`num_coalesced`: the sender's total of that name. `steps`: those since the last call."""
        now = Snapshot(stats, ready, num_coalesced, self._refused, self._failed)
        for series, metric in self._gauges:
            self._defer(partial(metric.set, float(series.value(now) or 0.0)))
        for counter in self._counters:
            if missing := counter.increment_to(counter.series.value(now) or 0.0):
                self._defer(partial(counter.metric.increment, missing))
        if self._of_steps:
            for step in _spread(list(steps), MOST_STEPS_OBSERVED):
                self._observe(self._of_steps, step)

    def observe(self, ended: EndedRequest) -> None:
        """A request whose final response was just sent."""
        if ended.error is not None:
            (self._failed if ended.request.handed_over else self._refused)[ended.error.code] += 1
        elif self._of_requests and ended.time_to_first_token_s is not None:
            self._observe(self._of_requests, ended)

    def close(self) -> None:
        """Shows a model that is gone as idle and not ready. Its series stay; see `_keep`."""
        for _, metric in self._gauges:
            self._defer(partial(metric.set, 0.0))

    def _observe(self, histograms: Iterable[tuple[Series[Any], Any]], subject: Any) -> None:
        for series, histogram in histograms:
            value = series.value(subject)
            if value is not None:
                self._defer(partial(histogram.observe, float(value)))

    def _create(self, family: Any, labels: dict[str, str], gauge_labels: dict[str, str]) -> None:
        families: dict[str, Any] = {}

        def make(series: Series[Any], kind: Any, labels: dict[str, str], **arguments: Any) -> Any:
            if series.name not in families:
                families[series.name] = _keep(family(name=series.name, description=series.help, kind=kind))
            return _keep(families[series.name].Metric(labels={**labels, **series.labels}, **arguments))

        self._gauges += [(series, make(series, family.GAUGE, gauge_labels)) for series in GAUGES]
        self._counters += [_Counter(series, make(series, family.COUNTER, labels)) for series in COUNTERS]
        if not hasattr(family, "HISTOGRAM"):
            log.info("no histograms: this server's metrics have none")
            return

        def histogram(series: Series[Any]) -> Any:
            return make(series, family.HISTOGRAM, labels, buckets=list(series.buckets))

        self._of_requests += [(series, histogram(series)) for series in REQUEST_HISTOGRAMS]
        self._of_steps += [(series, histogram(series)) for series in STEP_HISTOGRAMS]


def _spread(steps: list[Step], most: int) -> list[Step]:
    """At most so many of them, at equal distances, the last one included."""
    if len(steps) <= most:
        return steps
    return [steps[(index + 1) * len(steps) // most - 1] for index in range(most)]
