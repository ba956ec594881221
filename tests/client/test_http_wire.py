"""Bytes over HTTP: what is written, and what is made of answers whole, in pieces, broken and late."""

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from client_twins import TWINS, MakeClient, twin
from octavo_client import (
    TLS,
    ConnectionLost,
    InternalError,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    Retries,
    SamplingParams,
    ServerUnreachable,
    TimedOut,
    Unavailable,
)
from octavo_client._http_messages import Events
from ports import free_ports
from scripted_http import CHUNKED, Request, answer, chunk, event, sends

ONE_TRY = Retries(attempts=1)


@pytest.fixture(params=TWINS)
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with twin(request.param) as make:
        yield make


def test_a_request_is_json_with_headers(make: MakeClient, serve: Any) -> None:
    server = serve(sends(answer(b'{"model_name":"llm","model_version":"1","id":"r","text_output":"hi"}')))
    client = make(server.url, model="a/b", model_version="2", headers={"Authorization": "Bearer x"})
    reply = client.generate("Grüße", SamplingParams(stop=["x"]), request_id="r", cache_salt="s")
    assert (reply.text, reply.model, reply.model_version) == ("hi", "llm", "1")
    (request,) = server.requests
    assert request.line == "POST /v2/models/a%2Fb/versions/2/generate HTTP/1.1"
    assert request.headers["authorization"] == "bearer x"
    assert request.headers["content-type"] == "application/json"
    assert request.body["text_input"] == "Grüße"
    assert request.body["id"] == "r"
    assert request.body["cache_salt"] == "s"
    assert json.loads(request.body["sampling_parameters"]) == {"stop": ["x"]}
    client.generate([1, 2])
    assert server.requests[1].body["input_ids"] == [1, 2]
    assert "text_input" not in server.requests[1].body


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_come_in_whatever_pieces(make: MakeClient, serve: Any, size: int) -> None:
    texts = ["één\u2028", "\x85zwei\r", "三", ""]
    body = b": a comment\r\n\r\n" + b"".join(event(text_output=text) for text in texts)
    parts = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
    server = serve(sends(CHUNKED, *parts, chunk(b"")))
    with make(server.url).stream("x") as stream:
        assert [delta.text for delta in stream] == texts[:3]
    assert server.requests[0].line.endswith("/generate_stream HTTP/1.1")
    assert server.cancelled == []


def test_events_split_at_line_feeds_only() -> None:
    events = Events()
    assert events.feed("data: {\u2028".encode()) == []
    assert events.feed(b"}\r\ndata:x\n\nnot data\nda") == ["{\u2028}".encode(), b"x"]
    assert events.feed(b"ta: y\n") == [b"y"]


def test_values_of_one_or_many_and_none(make: MakeClient, serve: Any) -> None:
    body = {"text_output": ["a", "b"], "num_output_tokens": [1, 0], "token_ids": 7, "num_input_tokens": 3}
    server = serve(sends(answer(json.dumps(body).encode())))
    whole = make(server.url).generate("x")
    assert [choice.token_ids for choice in whole.choices] == [(7,), ()]
    assert whole.usage.prompt_tokens == 3


@pytest.mark.parametrize("streams", [False, True])
def test_errors_before_the_first_token(make: MakeClient, serve: Any, streams: bool) -> None:
    refusal = b'{"error":"[INVALID_ARG] \'n\' is 0"}'
    refusal = b"data: " + refusal + b"\n\n" if streams else refusal
    server = serve(sends(answer(refusal, "400 Bad Request")))
    client = make(server.url)
    with pytest.raises(InvalidArgument, match=r"^'n' is 0$"):
        list(client.stream("x")) if streams else client.generate("x")
    assert len(server.requests) == 1
    assert server.cancelled == []


def test_unavailable_is_tried_again_on_the_wire(make: MakeClient, serve: Any) -> None:
    def script(request: Request, connection: socket.socket) -> None:
        if len(server.requests) < 3:
            connection.sendall(answer(b'{"error":"[UNAVAILABLE] full"}', "400 Bad Request"))
        else:
            connection.sendall(answer(b'{"text_output":"at last"}'))

    server = serve(script)
    client = make(server.url, retries=Retries(attempts=3, first_pause_s=0.01))
    assert client.generate("x").text == "at last"
    assert len({request.body["id"] for request in server.requests}) == 1


def test_an_error_among_the_events_of_one_chunk(make: MakeClient, serve: Any) -> None:
    body = event(text_output="a") + event(error="[INTERNAL] step failed") + event(text_output="b")
    server = serve(sends(CHUNKED, chunk(body), chunk(b"")))
    with make(server.url).stream("x") as stream:
        assert next(stream).text == "a"
        with pytest.raises(InternalError, match=r"^step failed$"):
            next(stream)
        assert stream.completion.text == "a"
    assert server.cancelled == []


def test_a_proxy_s_page_and_an_answer_that_is_no_json(make: MakeClient, serve: Any) -> None:
    server = serve(sends(answer(b"<html>no</html>", "503 Busy", "text/html")))
    with pytest.raises(Unavailable, match="<html>no</html>"):
        make(server.url, retries=ONE_TRY).generate("x")
    server.script = sends(answer(b"", "401 Who"))
    with pytest.raises(PermissionDenied, match="401"):
        make(server.url).generate("x")
    server.script = sends(answer(b"hello"))
    with pytest.raises(ProtocolError, match="no JSON object"):
        make(server.url).generate("x")


def test_a_connection_that_breaks_is_not_tried_again(make: MakeClient, serve: Any) -> None:
    server = serve(sends(CHUNKED, chunk(event(text_output="a")), close=True))
    client = make(server.url)
    with client.stream("x") as stream:
        assert next(stream).text == "a"
        with pytest.raises(ConnectionLost):
            next(stream)
    server.script = sends(close=True)
    with pytest.raises(ConnectionLost):
        client.generate("x")
    assert len(server.requests) == 2


def test_nobody_there(make: MakeClient) -> None:
    client = make(f"http://127.0.0.1:{free_ports(1)[0]}", retries=Retries(attempts=2, first_pause_s=0.01))
    with pytest.raises(ServerUnreachable):
        client.generate("x")
    with pytest.raises(ServerUnreachable):
        client.model_info()
    assert not client.health().live


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_leaving_cancels_by_the_id_and_closes(make: MakeClient, serve: Any) -> None:
    seen: list[bytes] = []

    def script(request: Request, connection: socket.socket) -> bool:
        connection.sendall(CHUNKED + chunk(event(text_output="a")))
        seen.append(connection.recv(1))
        return False

    server = serve(script)
    with make(server.url).stream("x", request_id="mine") as stream:
        next(stream)
    assert server.cancelled == ["mine"]
    wait_for(lambda: seen == [b""])


def test_a_cancellation_that_finds_nothing_is_repeated_a_little(make: MakeClient, serve: Any) -> None:
    """An instance of the model that has no such request answers so; over HTTP a request that is done, too."""
    server = serve(sends(CHUNKED, chunk(event(text_output="a"))))
    for message, tries in (("[NOT_FOUND] no open request", 5), ("unexpected inference input", 1)):
        server.cancelled.clear()
        server.cancellation = answer(json.dumps({"error": message}).encode(), "400 Bad Request")
        with make(server.url).stream("x") as stream:
            next(stream)
        assert len(server.cancelled) == tries


@pytest.mark.parametrize("parts", [(), (CHUNKED, chunk(event(text_output="a")))])
def test_time_that_is_up_cancels(make: MakeClient, serve: Any, parts: tuple[bytes, ...]) -> None:
    server = serve(sends(*parts))
    started_s = time.monotonic()
    with pytest.raises(TimedOut), make(server.url).stream("x", request_id="late", timeout_s=0.2) as stream:
        list(stream)
    assert 0.2 <= time.monotonic() - started_s < 2
    assert server.cancelled == ["late"]


def test_time_is_up_while_deltas_keep_coming(make: MakeClient, serve: Any) -> None:
    parts = [chunk(event(text_output="a"))] * 30
    server = serve(sends(CHUNKED, *parts, chunk(b""), pause_s=0.05))
    with pytest.raises(TimedOut), make(server.url).stream("x", timeout_s=0.3) as stream:
        list(stream)
    assert 2 <= stream.completion.text.count("a") <= 8


def test_metrics_come_from_their_own_port_without_the_headers(make: MakeClient, serve: Any) -> None:
    metrics = serve(sends(answer(b"a 1\n", kind="text/plain")))
    server = serve(sends(answer(b"{}")))
    client = make(server.url, metrics_url=f"{metrics.url}/metrics", headers={"Authorization": "secret"})
    assert client.metrics().value("a") == 1
    assert "authorization" not in metrics.requests[0].headers
    metrics.script = sends(answer(b"gone", "404 Not Found"))
    with pytest.raises(Exception, match="gone"):
        client.metrics()


def test_health_asks_three_times(make: MakeClient, serve: Any) -> None:
    def script(request: Request, connection: socket.socket) -> None:
        ready = "/models/" not in request.line
        connection.sendall(answer(b"", "200 OK" if ready else "400 Bad Request"))

    server = serve(script)
    health = make(server.url).health()
    assert (health.live, health.ready, health.model_ready) == (True, True, False)
    assert [request.line.split()[1] for request in server.requests] == [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/llm/ready",
    ]


def test_tls_files_make_a_context() -> None:
    assert TLS().context().verify_mode is ssl.CERT_REQUIRED
    trusting = TLS(verify=False).context()
    assert (trusting.verify_mode, trusting.check_hostname) == (ssl.CERT_NONE, False)
    with pytest.raises(FileNotFoundError):
        TLS(ca_file="/absent.pem").context()
