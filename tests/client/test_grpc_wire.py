"""gRPC streams to a server of our own: what is written, and how a request ends without cancelling its call.

To cancel the call itself is what must not happen as long as the server answers, so the server here knows.
"""

import asyncio
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client_twins import TWINS, MakeClient, twin
from octavo_client import (
    TLS,
    AsyncClient,
    Client,
    ConnectionLost,
    InvalidArgument,
    MockTransport,
    NotFound,
    Retries,
    SamplingParams,
    ServerUnreachable,
    TimedOut,
)
from octavo_client._grpc_messages import encode
from ports import free_ports

Messages = Iterator[Any]


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`script(first message, all that follow, context)` yields the messages of a stream."""

    def __init__(self) -> None:
        self.script: Callable[[Any, Messages, Any], Messages] = answers(b"hi")
        self.first: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.statuses: queue.SimpleQueue[bool] = queue.SimpleQueue()  # was a stream's call cancelled?

    def ModelStreamInfer(self, request_iterator: Messages, context: Any) -> Messages:
        cancelled = threading.Event()
        ended = threading.Event()

        def on_end() -> None:
            if not ended.is_set():
                cancelled.set()
            self.statuses.put(cancelled.is_set())

        context.add_callback(on_end)
        message = next(request_iterator)
        self.first.append(message)
        self.metadata.append(dict(context.invocation_metadata()))
        yield from self.script(message, request_iterator, context)
        for _ in request_iterator:  # to where the client closes its side
            pass
        ended.set()

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=False)

    def ModelReady(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for you")


def text(id: str, content: bytes, final: bool) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    response.id = id
    response.parameters["triton_final_response"].bool_param = final
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", len(content)) + content)
    return message


def failure(id: str, message: str) -> Any:
    answer = service_pb2.ModelStreamInferResponse(error_message=message)
    answer.infer_response.id = id
    return answer


def answers(*texts: bytes) -> Callable[[Any, Messages, Any], Messages]:
    def script(first: Any, more: Messages, context: Any) -> Messages:
        del more, context
        for i, content in enumerate(texts):
            yield text(first.id, content, i == len(texts) - 1)

    return script


def endless(refusals: int = 0) -> Callable[[Any, Messages, Any], Messages]:
    """Two deltas, then nothing until it is cancelled by id, which is not found so many times before."""

    def script(first: Any, more: Messages, context: Any) -> Messages:
        del context
        yield text(first.id, b"a", False)
        yield text(first.id, b"b", False)
        for i, message in enumerate(more):
            assert message.inputs[0].name == "cancel_request_id"
            assert message.raw_input_contents[0][4:].decode() == first.id
            if i < refusals:
                yield failure(message.id, "[NOT_FOUND] no open request")
                continue
            yield text(message.id, b"", True)
            yield failure(first.id, "[CANCELLED] the request was cancelled")
            return

    return script


def deaf(first: Any, more: Messages, context: Any) -> Messages:
    """Hangs, and knows nothing of cancelling."""
    del more
    yield text(first.id, b"a", False)
    while context.is_active():
        time.sleep(0.01)


def unable(first: Any, more: Messages, context: Any) -> Messages:
    """Goes on, and refuses to be cancelled by id."""
    yield text(first.id, b"a", False)
    yield failure(next(more).id, "unexpected inference input 'cancel_request_id'")
    while context.is_active():
        time.sleep(0.01)


@contextmanager
def running(credentials: Any = None) -> Iterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def server() -> Iterator[tuple[Servicer, str]]:
    with running() as started:
        yield started


@pytest.fixture
def servicer(server: tuple[Servicer, str]) -> Servicer:
    return server[0]


@pytest.fixture
def url(server: tuple[Servicer, str]) -> str:
    return f"grpc://{server[1]}"


@pytest.fixture(params=TWINS)
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with twin(request.param) as make:
        yield make


def test_a_request_in_tensors(make: MakeClient, servicer: Servicer, url: str) -> None:
    client = make(url, model="m", model_version="3", headers={"X-Key": "k"})
    assert client.generate([1, -2], SamplingParams(n=1), request_id="r", tenant="t", priority=4).text == "hi"
    (message,) = servicer.first
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "r")
    tensors = {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    assert tensors["input_ids"] == ("INT32", [2], struct.pack("<2i", 1, -2))
    assert tensors["stream"] == ("BOOL", [1], b"\0")
    assert tensors["sampling_parameters"] == ("BYTES", [1], b'\x08\0\0\0{"n": 1}')
    assert message.parameters["tenant"].string_param == "t"
    assert message.parameters["octavo_priority"].int64_param == 4
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    assert servicer.metadata[0]["x-key"] == "k"
    assert "triton_grpc_error" not in servicer.metadata[0]


def test_many_streams_share_a_client(url: str, servicer: Servicer) -> None:
    servicer.script = answers(b"a", b"b", b"")
    with Client(url) as client:
        streams = [client.stream(str(i)) for i in range(5)]
        firsts = [next(stream).text for stream in streams]
        assert firsts == ["a"] * 5
        assert ["".join(delta.text for delta in stream) for stream in streams] == ["b"] * 5
    assert [servicer.statuses.get(timeout=5) for _ in streams] == [False] * 5


@pytest.mark.parametrize("refusals", [0, 3])
def test_leaving_cancels_by_the_id_and_never_the_call(
    make: MakeClient, servicer: Servicer, url: str, refusals: int
) -> None:
    servicer.script = endless(refusals)
    with make(url).stream("x") as stream:
        next(stream)
    assert servicer.statuses.get(timeout=5) is False


def test_leaving_with_everything_but_the_end_read(make: MakeClient, servicer: Servicer, url: str) -> None:
    servicer.script = answers(b"a", b"b")
    with make(url).stream("x") as stream:
        next(stream), next(stream)
    assert servicer.statuses.get(timeout=5) is False


def test_time_that_is_up_cancels_by_the_id(make: MakeClient, servicer: Servicer, url: str) -> None:
    servicer.script = endless(1)
    started_s = time.monotonic()
    with make(url).stream("x", timeout_s=0.3) as stream:
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        with pytest.raises(TimedOut):
            next(stream)
    assert 0.3 <= time.monotonic() - started_s < 2
    assert servicer.statuses.get(timeout=5) is False


@pytest.mark.parametrize(("script", "least_s", "most_s"), [(deaf, 0.3, 2), (unable, 0, 0.3)])
def test_a_server_that_cannot_cancel_by_id_has_its_call_cancelled(
    make: MakeClient,
    servicer: Servicer,
    url: str,
    script: Any,
    least_s: float,
    most_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo_client._grpc.CANCEL_TIMEOUT_S", 0.3)
    servicer.script = script
    with make(url).stream("x") as stream:
        next(stream)
        left_s = time.monotonic()
    assert least_s <= time.monotonic() - left_s < most_s
    assert servicer.statuses.get(timeout=5) is True
    with make(url).stream("x", timeout_s=0.1) as stream:
        next(stream)
        with pytest.raises(TimedOut):
            next(stream)


def test_a_cancelled_task_does_not_cancel_the_call(servicer: Servicer, url: str) -> None:
    servicer.script = endless()

    async def read(client: AsyncClient) -> None:
        async with client.stream("x") as stream:
            async for _ in stream:
                pass

    async def run() -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(client), 0.2)

    asyncio.run(run())
    assert servicer.statuses.get(timeout=5) is False


def test_errors_of_a_stream_and_of_its_call(make: MakeClient, servicer: Servicer, url: str) -> None:
    client = make(url, retries=Retries(attempts=1))
    servicer.script = lambda first, more, context: iter([failure(first.id, "[INVALID_ARG] 'n' is 0")])
    with pytest.raises(InvalidArgument, match=r"^'n' is 0$"):
        client.generate("x")

    def abort(first: Any, more: Messages, context: Any) -> Messages:
        del more
        yield text(first.id, b"a", False)
        context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'x' is not found")

    servicer.script = abort
    with pytest.raises(NotFound), client.stream("x") as stream:
        list(stream)
    servicer.script = lambda first, more, context: iter(())
    with pytest.raises((ConnectionLost, TimedOut)):
        client.generate("x", timeout_s=0.3)


def test_nobody_there(make: MakeClient) -> None:
    client = make(f"grpc://127.0.0.1:{free_ports(1)[0]}", retries=Retries(attempts=2, first_pause_s=0.01))
    with pytest.raises(ServerUnreachable):
        client.generate("x")
    assert not client.health().live


def test_what_cannot_be_written() -> None:
    mock = MockTransport(lambda request: "x")
    with Client(transport=mock) as client:
        client.generate("\ud800")
        client.generate([2**31])
    with pytest.raises(InvalidArgument, match="surrogate"):
        encode(mock.requests[0])
    with pytest.raises(InvalidArgument, match="'input_ids'"):
        encode(mock.requests[1])


def test_health_of_a_server_that_refuses_to_tell(make: MakeClient, url: str) -> None:
    health = make(url).health()
    assert (health.live, health.ready, health.model_ready) == (True, False, False)


def certificate(folder: Path) -> tuple[str, str]:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    key, signed = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1".split()
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(signed)]
    subprocess.run(command, check=True, capture_output=True)
    return str(key), str(signed)


def test_tls(make: MakeClient, tmp_path: Path) -> None:
    key, signed = certificate(tmp_path)
    pair = (Path(key).read_bytes(), Path(signed).read_bytes())
    with running(grpc.ssl_server_credentials([pair])) as (_, address):
        assert make(f"grpcs://{address}", tls=TLS(ca_file=signed)).generate("x").text == "hi"
        with pytest.raises(ServerUnreachable):
            make(f"grpcs://{address}", retries=Retries(attempts=1)).generate("x")
    with pytest.raises(ValueError, match="ca_file"):
        make("grpcs://localhost", tls=TLS(verify=False))
