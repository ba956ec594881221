"""What a real server tells of its requests beside the metrics: its log, spans, and Triton's own traces."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector import Collector, attributes, collector
from octavo.serving.launcher import RunningServer
from octavo.serving.tracing import SPAN
from triton_clients import GrpcStream, StartServer, generate, make_repository
from waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "an uncommon sentence"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def traced(
    start_server: StartServer, weights: str, spans: Collector, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """A server that logs requests and sends spans, Triton's and ours, to the same collector."""
    repository = make_repository(
        tmp_path_factory.mktemp("repository"),
        backend="octavo",
        parameters={"request_log": "json"},
        model=weights,
        max_model_len=128,
        num_threads=1,
        otlp_traces_endpoint=spans.endpoint,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        trace = ("mode=opentelemetry", f"opentelemetry,url={spans.endpoint}", "rate=1", "level=TIMESTAMPS")
        return start_server(
            repository,
            extra_arguments=(
                *(f"--trace-config={setting}" for setting in trace),
                "--trace-config=opentelemetry,bsp_schedule_delay=100",
            ),
        )


def request_lines(server: RunningServer, request_id: str, count: int) -> list[dict[str, Any]]:
    """The request log's lines of a request, once there are so many."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        lines = server.log_path.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith('{"time"')]
        found = [line for line in found if line["request_id"] == request_id]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_requests_are_lines_of_json_in_the_servers_log_without_their_prompts(traced: RunningServer) -> None:
    with GrpcStream(traced) as stream:
        stream.send("job-7", text_input=SECRET, sampling_parameters='{"max_tokens": 4, "ignore_eos": true}')
        stream.result()
    with GrpcStream(traced) as stream:
        assert "[INVALID_ARG]" in stream.send("job-8", text_input=SECRET, sampling_parameters=SECRET).error()
    accepted, finished = request_lines(traced, "job-7", 2)
    assert (accepted["event"], accepted["model"], accepted["max_tokens"]) == ("accepted", "llm", 4)
    assert (finished["event"], finished["finish_reasons"], finished["output_tokens"]) == (
        "finished",
        ["length"],
        4,
    )
    assert finished["prompt_tokens"] == accepted["prompt_tokens"] > 4
    (failed,) = request_lines(traced, "job-8", 1)
    assert (failed["event"], failed["code"]) == ("failed", "INVALID_ARG")
    assert SECRET not in traced.log_path.read_text(errors="replace")


def test_a_span_reaches_the_collector_as_the_child_that_the_client_says(
    traced: RunningServer, spans: Collector
) -> None:
    answer = generate(traced, text_input="the", max_tokens=4, ignore_eos=True, traceparent=PARENT)
    assert answer["text_output"]

    def named() -> list[Span]:
        return [span for span in spans.spans(SPAN) if span.trace_id.hex() == PARENT.split("-")[1]]

    spans.wait_for(lambda: bool(named()))
    (span,) = named()
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    found = attributes(span)
    assert found["gen_ai.request.model"] == "llm"
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [event.time_unix_nano for event in span.events]
    assert span.start_time_unix_nano == times[0] <= times[1] <= times[2] <= span.end_time_unix_nano


def test_a_span_is_the_child_of_tritons_own_and_so_of_the_headers_that_came(
    traced: RunningServer, spans: Collector
) -> None:
    trace_id = "1af7651916cd43dd8448eb211c80319d"
    answer = httpx.post(
        f"http://{traced.http}/v2/models/llm/generate",
        json={"text_input": "the", "max_tokens": 2},
        headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == 200

    def named(name: str) -> list[Span]:
        return [span for span in spans.spans(name) if span.trace_id.hex() == trace_id]

    spans.wait_for(lambda: bool(named("llm") and named(SPAN)))
    (span,) = named(SPAN)
    assert span.parent_span_id in {parent.span_id for parent in named("llm")}


@pytest.fixture(scope="module")
def plain(start_server: StartServer, weights: str, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server with Triton's own kind of traces, switched off yet."""
    folder = tmp_path_factory.mktemp("plain")
    repository = make_repository(
        folder / "repository", backend="octavo", model=weights, max_model_len=128, num_threads=1
    )
    return start_server(repository, extra_arguments=(f"--trace-config=triton,file={folder / 'trace.json'}",))


def traces(server: RunningServer, request_id: str) -> set[str]:
    """The names of a request's time stamps in Triton's trace file; none if it is not there."""
    entries: list[dict[str, Any]] = []
    for path in server.options.repository.parent.glob("trace.json*"):
        with contextlib.suppress(ValueError):  # it is just being written
            entries += json.loads(path.read_text())
    ids = {entry["id"] for entry in entries if entry.get("request_id") == request_id}
    stamps = [stamp for entry in entries if entry["id"] in ids for stamp in entry.get("timestamps", ())]
    return {stamp["name"] for stamp in stamps}


def switch_over_http(server: RunningServer, settings: dict[str, Any]) -> list[str]:
    url = f"http://{server.http}/v2/models/llm/trace/setting"
    changed = httpx.post(url, json=settings, timeout=TIMEOUT_S)
    assert changed.status_code == 200, changed.text
    found = httpx.get(url, timeout=TIMEOUT_S).json()["trace_level"]
    assert isinstance(found, list)
    return found


def switch_over_grpc(server: RunningServer, settings: dict[str, Any]) -> list[str]:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.update_trace_settings("llm", settings, client_timeout=TIMEOUT_S)
        found = client.get_trace_settings("llm", client_timeout=TIMEOUT_S).settings["trace_level"].value
    return list(found)


@pytest.mark.parametrize("switch", [switch_over_http, switch_over_grpc])
def test_tritons_traces_are_switched_on_and_off_and_written_as_ever(
    plain: RunningServer, switch: Callable[[RunningServer, dict[str, Any]], list[str]]
) -> None:
    def ask(request_id: str) -> None:
        with GrpcStream(plain) as stream:
            stream.send(request_id, text_input="the", sampling_parameters='{"max_tokens": 2}').result()

    name = switch.__name__
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
    assert switch(plain, settings) == ["TIMESTAMPS"]
    ask(f"{name} on")
    expected = {"REQUEST_START", "COMPUTE_START", "REQUEST_END"}
    wait_until(lambda: expected <= traces(plain, f"{name} on"), "the request is not traced", TIMEOUT_S)
    assert switch(plain, {"trace_level": ["OFF"]}) == ["OFF"]
    ask(f"{name} off")
    assert switch(plain, settings) == ["TIMESTAMPS"]
    ask(f"{name} on again")
    wait_until(lambda: expected <= traces(plain, f"{name} on again"), "it is not traced again", TIMEOUT_S)
    assert traces(plain, f"{name} off") == set()
