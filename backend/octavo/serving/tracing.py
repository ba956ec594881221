"""Spans: one for each request, sent to a collector by OpenTelemetry's protocol (OTLP) where one is set.

A span is made by the reporting thread once its request has ended, of the times that were taken on the way,
and exported in batches by a thread of the SDK: neither the engine nor the sender ever waits for a collector.
Made by `reporting`; `repository` asks for the packages, which the extra `tracing` brings.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.serving.ended_request import EndedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("octavo")

KEY = "otlp_traces_endpoint"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC, _HTTP = "grpc", "http/protobuf"

SPAN = "llm_request"  # as vLLM calls it


def exporter_of(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> "SpanExporter | None":
    """To the endpoint of model.json, else to that of OpenTelemetry's own variables; None without either.

    Those variables also say the protocol (gRPC unless they do, as in vLLM), headers, certificates and time
    limits. Raises `ConfigError` when the endpoint of model.json needs what is not installed, and for a
    protocol that there is no exporter for.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None and not any(environ.get(name) for name in _ENDPOINTS):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    protocol = next((value for name in _PROTOCOLS if (value := environ.get(name))), _GRPC)
    if protocol not in (_GRPC, _HTTP):
        raise ConfigError(
            f"the environment asks for spans by the protocol {protocol!r} ({' or '.join(_PROTOCOLS)}); "
            f"allowed: {_GRPC}, {_HTTP}"
        )
    try:
        require_packages()
    except ConfigError as error:
        if endpoint is not None:
            raise
        # Variables are often set for a whole machine; a model that was served before still is.
        log.warning("no spans: %s", error)
        return None
    # Imported late: few servers have a collector, and the packages are an extra.
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint)


def require_packages() -> None:
    """Raises `ConfigError` where spans cannot be made for want of OpenTelemetry."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"'{KEY}' is set, and spans need OpenTelemetry ({error}): pip install "
            "'octavo[tracing]', or leave it out",
            KEY,
        ) from None


def carrier_of(context: str | None) -> dict[str, str]:
    """The headers of W3C's trace context in what Triton says of its own trace, which is JSON; none where that
    has none, or is of another kind."""
    try:
        found = json.loads(context or "{}")
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)} if found else {}


class RequestSpans:
    """`record` on one thread; `close` once, after the last."""

    def __init__(self, exporter: "SpanExporter", model: str, version: str, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.instance.id": instance, "octavo.model_version": version})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # nobody named it
            resource = resource.merge(Resource({"service.name": "octavo"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def record(self, ended: EndedRequest) -> None:
        """Makes the span of a request. Its parent is the one that the request named, if it named one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if ended.is_control:
            return
        arrived_s = ended.request.arrived_s
        offset_ns = time.time_ns() - time.monotonic_ns()  # from the clock of durations to that of dates

        def at(time_s: float) -> int:
            return offset_ns + round(time_s * 1e9)

        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(ended.request.trace_context),
            kind=SpanKind.SERVER,
            attributes=_attributes(ended, self._model),
            start_time=at(arrived_s),
        )
        begin_s = arrived_s
        if stats := ended.stats:
            for name, duration_s in (
                ("queue", stats.queue_s),
                ("prefill", stats.prefill_s),
                ("decode", stats.decode_s),
            ):
                span.add_event(name, {"octavo.duration_s": duration_s}, timestamp=at(begin_s))
                begin_s += duration_s
        if ended.error is not None:
            span.set_status(Status(StatusCode.ERROR, type(ended.error).__name__))
        span.end(at(ended.ended_s))

    def close(self, timeout_s: float) -> None:
        """Exports what is left; a collector that does not answer is not waited for beyond the time given."""
        closing = threading.Thread(target=self._provider.shutdown, name="octavo-spans-end", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _attributes(ended: EndedRequest, model: str) -> dict[str, Any]:
    """By OpenTelemetry's conventions for generative AI, and by vLLM's names where those have none, or had
    others. What a client wrote is in none of them but the id that it gave."""
    request, stats = ended.request, ended.stats
    found: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.client_id or request.id,
        "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_tokens,
        "gen_ai.usage.completion_tokens": request.num_tokens,
        "gen_ai.response.finish_reasons": ended.finish_reasons or None,
        "gen_ai.latency.e2e": ended.latency_s,
        "gen_ai.latency.time_to_first_token": ended.time_to_first_token_s,
        "error.type": None if ended.error is None else ended.error.code,
    }
    if request.reply is not None and request.operation != "embeddings":
        params = request.reply.params
        found |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    if stats is not None:
        found |= {
            "gen_ai.latency.time_in_queue": stats.queue_s,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_s,
            "gen_ai.latency.time_in_model_decode": stats.decode_s,
            "gen_ai.latency.time_in_model_inference": stats.prefill_s + stats.decode_s,
            "octavo.cached_prompt_tokens": stats.cached_prompt_tokens,
            "octavo.preemptions": stats.preemptions,
        }
    return {name: value for name, value in found.items() if value is not None}
