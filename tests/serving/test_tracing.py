"""Spans: what one says of a request, whose child it is, where it goes, and that nobody waits for it."""

import json
import logging
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from collector import attributes, collector
from fakes import InferenceRequest, Load
from octavo.config import resolve
from octavo.errors import ConfigError
from octavo.serving import tracing
from octavo.serving.tracing import SPAN, carrier_of, exporter_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.fixture
def spans(glue: ModuleType, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a model that is loaded exports, once it is finalized."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(glue, "exporter_of", lambda config: exporter)
    return exporter


def the_span(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


def test_a_span_tells_of_its_request_and_of_where_the_time_went(
    load: Load, spans: InMemorySpanExporter
) -> None:
    llm, started_ns = load(), time.time_ns()
    parameters = {"max_tokens": 3, "n": 2, "temperature": 0.5}
    llm.ask("mine", parameters, text_input="hello").sender.wait()
    llm.finalize()
    span = the_span(spans)
    assert (span.name, span.kind, span.parent) == (SPAN, SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "octavo"
    assert span.resource.attributes["service.instance.id"] == "llm_0_0"
    found = dict(span.attributes or {})
    latencies = {name: found.pop(f"gen_ai.latency.{name}") for name in ("e2e", "time_to_first_token")}
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "llm",
        "gen_ai.response.model": "llm",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "octavo.cached_prompt_tokens": 4,
        "octavo.preemptions": 2,
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert started_ns - 10**8 <= span.start_time < span.end_time <= time.time_ns() + 10**8
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(latencies["e2e"], abs=1e-6)
    assert 0 < latencies["time_to_first_token"] <= latencies["e2e"]
    events = [(event.name, (event.timestamp - span.start_time) / 1e9) for event in span.events]
    assert [name for name, _ in events] == ["queue", "prefill", "decode"]
    assert [at_s for _, at_s in events] == pytest.approx([0, 0.5, 0.75], abs=1e-6)
    assert [dict(event.attributes or {}) for event in span.events] == [
        {"octavo.duration_s": 0.5},
        {"octavo.duration_s": 0.25},
        {"octavo.duration_s": 1.5},
    ]


def test_errors_are_spans_too_and_quote_nobody(load: Load, spans: InMemorySpanExporter) -> None:
    llm = load()
    llm.ask(text_input="secret", sampling_parameters='{"top_p": "secret"}').sender.error()
    llm.finalize()
    span = the_span(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "INVALID_ARG"
    assert span.attributes["gen_ai.request.id"] == "request-1"
    assert span.events == ()
    assert "secret" not in span.to_json()


def test_embeddings_have_no_sampling_parameters(load: Load, spans: InMemorySpanExporter) -> None:
    llm = load()
    llm.ask(embedding_request='{"input": "a"}').sender.wait()
    llm.finalize()
    found = the_span(spans).attributes
    assert found is not None
    assert found["gen_ai.operation.name"] == "embeddings"
    assert "gen_ai.request.max_tokens" not in found


@pytest.mark.parametrize(
    ("parameters", "of_triton", "is_child"),
    [
        ({"traceparent": PARENT, "tracestate": "a=b"}, None, True),
        ({"traceparent": PARENT, "tracestate": ""}, None, True),
        ({"traceparent": PARENT}, json.dumps({"traceparent": PARENT.replace("0af7", "1111")}), True),
        ({}, json.dumps({"traceparent": PARENT}), True),
        ({"traceparent": "00-nonsense"}, None, False),
        ({"traceparent": 7}, None, False),
        ({}, "", False),
        ({}, "not JSON", False),
    ],
)
def test_a_span_is_the_child_of_the_one_that_the_request_names(
    load: Load,
    spans: InMemorySpanExporter,
    parameters: dict[str, Any],
    of_triton: str | None,
    is_child: bool,
) -> None:
    llm = load()
    request = InferenceRequest("", {"max_tokens": 1, **parameters}, text_input="a")
    if of_triton is not None:
        request.trace = lambda: SimpleNamespace(get_context=lambda: of_triton)  # type: ignore[attr-defined]
    llm.execute(request)
    assert request.sender.texts() == [["aa"]]
    llm.finalize()
    span = the_span(spans)
    if not is_child:
        assert span.parent is None
        return
    assert span.parent is not None
    assert span.context is not None
    assert format_trace_id(span.context.trace_id) == PARENT.split("-")[1]
    assert format_span_id(span.parent.span_id) == PARENT.split("-")[2]
    assert span.parent.trace_state.get("a") == ("b" if parameters.get("tracestate") else None)


def test_headers_of_triton_are_read_whatever_they_are() -> None:
    assert carrier_of(json.dumps({"traceparent": "x", "n": 1})) == {"traceparent": "x"}
    for nothing in (None, "", "{", "{}"):
        assert carrier_of(nothing) == {}


def test_spans_reach_a_collector_over_http(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with collector() as found:
        llm = load({"model": "m.gguf", "otlp_traces_endpoint": found.endpoint})
        llm.ask("one", {"max_tokens": 2}, text_input="a").sender.wait()
        llm.ask("two", {"max_tokens": 2}, text_input="a").sender.wait()
        llm.finalize()
        found.wait_for(lambda: len(found.spans(SPAN)) == 2)
        ids = [attributes(span)["gen_ai.request.id"] for span in found.spans(SPAN)]
    assert ids == ["one", "two"]
    assert attributes(found.resources[0].resource)["service.name"] == "octavo"  # type: ignore[arg-type]


def test_spans_reach_a_collector_over_grpc_by_default(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                came.extend(span.name for scope in resource.scope_spans for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    came: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        llm = load()
        llm.ask("", {"max_tokens": 1}, text_input="a").sender.wait()
        llm.finalize()
        server.stop(None).wait()
    assert came == [SPAN]


def test_without_an_endpoint_nothing_is_loaded() -> None:
    config = resolve({"model": "m"})
    assert exporter_of(config, {}) is None
    assert exporter_of(config, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    off = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"}
    assert exporter_of(config, off) is None


def test_a_protocol_without_an_exporter_is_named() -> None:
    config = resolve({"model": "m", "otlp_traces_endpoint": "http://localhost:1"})
    with pytest.raises(ConfigError, match=r"the protocol 'http/json' .*; allowed: grpc, http/protobuf"):
        exporter_of(config, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})


def test_a_missing_extra_is_named_where_the_model_asks_for_spans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = resolve({"model": "m", "otlp_traces_endpoint": "http://localhost:1"})
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[tracing\]'") as caught:
        exporter_of(config, {})
    assert caught.value.key == "otlp_traces_endpoint"
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert exporter_of(resolve({"model": "m"}), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None
    assert "no spans: " in caplog.text


def test_a_collector_that_hangs_delays_neither_requests_nor_the_end(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.serving.tritonserver._JOIN_S", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with socket.socket() as deaf:  # takes connections, and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        config = resolve(
            {"model": "m", "otlp_traces_endpoint": f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces"}
        )
        exporter = exporter_of(config, HTTP)
        monkeypatch.setattr("octavo.serving.tritonserver.exporter_of", lambda config: exporter)
        before = set(threading.enumerate())
        llm = load()
        for _ in range(20):
            assert llm.ask("", {"max_tokens": 1}, text_input="a").sender.texts() == [["aa"]]
        started_s = time.monotonic()
        llm.finalize()
        assert time.monotonic() - started_s < 5
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def test_check_needs_the_extra_only_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="'otlp_traces_endpoint' is set, and spans need OpenTelemetry"):
        tracing.require_packages()
