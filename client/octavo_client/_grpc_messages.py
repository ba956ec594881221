"""What goes over gRPC and what it means: requests to messages, messages to replies and errors. No I/O.

Used by `_grpc`. The messages are those of tritonclient, which are Triton's and KServe's.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2

from octavo_client._base import Question, Value, WireRequest
from octavo_client._errors import (
    Cancelled,
    ConnectionLost,
    InternalError,
    InvalidArgument,
    NotFound,
    OctavoError,
    PermissionDenied,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    Unavailable,
    Unsupported,
    from_message,
)
from octavo_client._replies import Reply
from octavo_client._types import TLS

_FINAL = "triton_final_response"
_FORMATS = {"BOOL": "?", "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d"}
_BY_STATUS: dict[Any, type[OctavoError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
}


def asking(stub: Any, question: Question, model: str, version: str) -> tuple[Any, Any]:
    """The method and the message of a question."""
    named = {"name": model, "version": version}
    match question:
        case Question.LIVE:
            return stub.ServerLive, service_pb2.ServerLiveRequest()
        case Question.READY:
            return stub.ServerReady, service_pb2.ServerReadyRequest()
        case Question.MODEL_READY:
            return stub.ModelReady, service_pb2.ModelReadyRequest(**named)
        case Question.METADATA:
            return stub.ModelMetadata, service_pb2.ModelMetadataRequest(**named)
        case Question.CONFIG:
            return stub.ModelConfig, service_pb2.ModelConfigRequest(**named)
        case Question.MODELS:
            return stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()


def answer_to(question: Question, message: Any) -> Mapping[str, Any]:
    values: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    match question:
        case Question.METADATA | Question.MODELS:
            return values
        case Question.CONFIG:
            return dict(values.get("config", {}))
        case _:
            return {"ready": next(iter(values.values()), False)}  # false is left out


class StreamState:
    """What one stream has to say, from its messages. The twins read and write it.

    A message is either about the request, or about the last cancellation of it.
    """

    def __init__(self, request: WireRequest) -> None:
        self._request = request
        self.final = False  # the request's last message has come
        self.out_of_time = False
        self.cancel_again = False  # no instance of the model has it, or another one
        self.cut = False  # the server knows no cancelling by id

    def take(self, message: Any) -> Reply | None:
        """Raises the request's error, which is its last message."""
        response = message.infer_response
        if response.id != self._request.request_id:
            self._take_cancellation(message)
            return None
        if message.error_message:
            raise self.over(from_message(message.error_message))
        self.final = response.parameters[_FINAL].bool_param
        if not response.outputs:
            return None
        outputs = {
            output.name: _values(output.datatype, raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        return Reply(outputs, response.model_name, response.model_version)

    def _take_cancellation(self, message: Any) -> None:
        if message.error_message:
            if isinstance(from_message(message.error_message), NotFound):
                self.cancel_again = not self.final
            else:
                self.cut = True

    def over(self, error: OctavoError) -> OctavoError:
        """The request ended so. A cancellation because time was up is not the user's."""
        self.final = True
        if self.out_of_time and isinstance(error, Cancelled):
            return TimedOut("the answer was not complete in time")
        return error


def early_end() -> OctavoError:
    """For a stream that the server closed."""
    return ConnectionLost("the server closed the stream before the answer's end")


@contextmanager
def typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from error


def from_rpc(error: Any) -> OctavoError:
    status, details = error.code(), error.details() or ""
    if status == grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return ServerUnreachable(f"no connection to the server: {details}")
    known = from_message(details)
    if type(known) is not OctavoError:
        return known
    if status == grpc.StatusCode.UNAVAILABLE:
        return ConnectionLost(f"the connection broke before the end of the answer: {details}")
    return _BY_STATUS.get(status, OctavoError)(details or str(status))


def encode(request: WireRequest) -> Any:
    message = service_pb2.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.request_id
    )
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in request.parameters.items():
        if isinstance(value, str):
            message.parameters[name].string_param = value
        else:
            message.parameters[name].int64_param = value
    for name, content in request.inputs.items():
        data_type, length, raw = _tensor(name, content)
        message.inputs.add(name=name, datatype=data_type, shape=[length])
        message.raw_input_contents.append(raw)
    return message


def _tensor(name: str, value: Value) -> tuple[str, int, bytes]:
    """Its type, its length and its content."""
    try:
        if isinstance(value, bool):
            return "BOOL", 1, struct.pack("?", value)
        if isinstance(value, str):
            text = value.encode()
            return "BYTES", 1, struct.pack("<I", len(text)) + text
        return "INT32", len(value), struct.pack(f"<{len(value)}i", *value)
    except UnicodeEncodeError:
        raise InvalidArgument(f"'{name}' holds half of a surrogate pair, which is no character") from None
    except struct.error as error:
        raise InvalidArgument(f"'{name}' holds what is no token id: {error}") from None


def _values(data_type: str, raw: bytes) -> list[Any]:
    if data_type in _FORMATS:
        return [value for (value,) in struct.iter_unpack(f"<{_FORMATS[data_type]}", raw)]
    if data_type != "BYTES":
        raise ProtocolError(f"an output of type {data_type}, which is none of the contract's")
    texts = []
    at = 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        texts.append(raw[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return texts


def credentials(tls: TLS) -> Any:
    if not tls.verify:
        raise ValueError("gRPC verifies whom it talks to, always; give the ca_file that signed the server")

    def read(path: str | None) -> bytes | None:
        return None if path is None else Path(path).read_bytes()

    return grpc.ssl_channel_credentials(read(tls.ca_file), read(tls.key_file), read(tls.cert_file))
