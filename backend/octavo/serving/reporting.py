"""What a model tells of its requests, as its operator wants it: metrics, the request log, spans.

Made by `tritonserver`, one for a model instance. Tokenizer threads tell it of accepted requests, the sender
of those that ended; both only leave word, and the reporting thread does what takes time.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.metrics import EngineStats, Step
from octavo.request import Request
from octavo.serving.ended_request import EndedRequest
from octavo.serving.model_settings import Settings
from octavo.serving.outbox import OpenRequest
from octavo.serving.reporting_thread import ReportingThread
from octavo.serving.request_log import RequestLog
from octavo.serving.tracing import RequestSpans
from octavo.serving.triton_metrics import TritonMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


class Reporting:
    """`start` once, `close` once."""

    def __init__(
        self,
        family: Any,
        settings: Settings,
        config: EngineConfig,
        args: Mapping[str, str],
        exporter: "SpanExporter | None",
    ) -> None:
        """`family` is `pb_utils.MetricFamily`, None where there is none; `args` are what Triton says of the
        instance; `exporter` is where spans go, if anywhere."""
        self._thread = ReportingThread()
        model, version, instance = args["model_name"], args["model_version"], args["model_instance_name"]
        off = _metrics_off(settings, config)
        self._metrics = TritonMetrics(family, model, version, instance, self._thread.put, off)
        self._log: RequestLog | None = None
        if settings.log_requests or config.enable_log_requests:  # the latter with prompts, as in vLLM
            of = {"model": model, "version": version, "instance": instance}
            self._log = RequestLog(of, self._thread.put, config.enable_log_requests, config.max_log_len)
        self._spans = RequestSpans(exporter, model, version, instance) if exporter is not None else None

    @property
    def has_spans(self) -> bool:
        return self._spans is not None

    def start(self) -> None:
        self._thread.start()

    def accepted(self, request: OpenRequest, ready: Request, text: str | None) -> None:
        """Just before the engine gets a request. `text` is its prompt's, if it came as one."""
        if self._log:
            self._log.accepted(request, ready, text)

    def ended(self, ended: EndedRequest) -> None:
        """After a request's final response."""
        self._metrics.observe(ended)
        if self._log:
            self._log.ended(ended)
        if self._spans:
            self._thread.put(partial(self._spans.record, ended))

    def update(self, stats: EngineStats, ready: bool, num_coalesced: int, steps: Iterable[Step]) -> None:
        """About once a second, and at the end. See `TritonMetrics.update`."""
        self._metrics.update(stats, ready, num_coalesced, steps)

    def close(self, timeout_s: float) -> None:
        """After the last request. Writes what is waiting."""
        self._metrics.close()
        self._thread.stop(timeout_s)
        if self._spans:
            self._spans.close(timeout_s)


def _metrics_off(settings: Settings, config: EngineConfig) -> str | None:
    """What the operator switched the metrics off with, as in Triton's vLLM backend; None if they are on."""
    if not settings.report_metrics:
        return "the parameter REPORT_CUSTOM_METRICS"
    return "'disable_log_stats' in model.json" if config.disable_log_stats else None
