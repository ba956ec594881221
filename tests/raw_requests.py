"""Requests as they travel, right or wrong: no client library looks at them before the server does.

One mapping stands for a request on either transport. What has the name of an input is one; all else is a
request parameter, as `/generate` sees it. Bytes that are not UTF-8 are sent as they are.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferRequest

from octavo.serving import codec
from octavo.serving.launcher import RunningServer
from triton_clients import TIMEOUT_S, bare_stream, own_channel

INPUTS = {spec.name: spec for spec in codec.INPUTS}


@dataclass(frozen=True)
class RawTensor:
    """An input over gRPC: its type and shape as declared, and what is sent as its content."""

    data_type: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, name: str, value: Any) -> "RawTensor":
        """What the input of that name is declared to be; a value that is no list is its one element."""
        if isinstance(value, RawTensor):
            return value
        values = value if isinstance(value, list) else [value]
        match INPUTS[name].data_type:
            case "STRING":
                return cls("BYTES", (len(values),), b"".join(map(string_element, values)))
            case "BOOL":
                return cls("BOOL", (len(values),), bytes(values))
            case _:
                return cls("INT32", (len(values),), struct.pack(f"<{len(values)}i", *values))


def string_element(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(content)) + content


def http_body(request: Mapping[str, Any]) -> bytes:
    text = json.dumps({name: _text(value) for name, value in request.items()}, ensure_ascii=False)
    return text.encode("utf-8", "surrogateescape")


def fits_http(request: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, RawTensor) for value in request.values())


def fits_grpc(request: Mapping[str, Any]) -> bool:
    """A parameter of gRPC is a boolean, an integer of 64 bits, a double or a string of whole characters."""
    return all(_fits_grpc(value) for name, value in request.items() if name not in INPUTS)


def grpc_message(request: Mapping[str, Any], model: str = "llm") -> ModelInferRequest:
    message = ModelInferRequest(model_name=model, id=request.get("id", ""))
    for name, value in request.items():
        if name in INPUTS or isinstance(value, RawTensor):
            tensor = RawTensor.of(name, value)
            message.inputs.add(name=name, datatype=tensor.data_type, shape=tensor.shape)
            message.raw_input_contents.append(tensor.content)
        elif name != "id":
            kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
            setattr(message.parameters[name], kind[type(value)], value)
    return message


def grpc_answers(server: RunningServer, message: ModelInferRequest) -> list[Any]:
    """The responses to one message, each with an `infer_response` or an `error_message`."""
    with own_channel(server.grpc) as channel:
        return list(bare_stream(channel, message, TIMEOUT_S))


def _fits_grpc(value: Any) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    is_integer = isinstance(value, int) and -(2**63) <= value < 2**63
    return is_integer or isinstance(value, (bool, float, RawTensor))


def _text(value: Any) -> Any:
    """With each byte that is no UTF-8 as half a surrogate pair, of those that stand for bytes."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return content.decode("utf-8", "surrogateescape") if isinstance(content, bytes) else value
