"""What goes over HTTP and what it means: requests to bodies, bodies to replies and errors. No I/O.

Used by `_http`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from octavo_client._base import ASK_TIMEOUT_S, Address, Deadline, Question, WireRequest
from octavo_client._errors import (
    ConnectionLost,
    NotFound,
    OctavoError,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    from_message,
    from_status,
)
from octavo_client._metrics import fetch as fetch_metrics
from octavo_client._replies import Reply
from octavo_client._types import TLS

_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_ABOUT_THE_REPLY = ("id", "model_name", "model_version")


class Events:
    """Bytes in, the data of server-sent events out.

    Lines end with line feeds only: JSON may hold the other characters at which Python splits texts.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class HttpMessages:
    """What the twins share: how requests are written and answers read."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        scheme = "https" if address.secure else "http"
        self._metrics_url = address.metrics_url
        self._tls = tls or TLS()
        self.connect_timeout_s = connect_timeout_s
        self.settings: dict[str, Any] = {
            "base_url": f"{scheme}://{address.netloc}",
            "headers": dict(headers),
            "limits": _NO_LIMITS,
            "timeout": self.timeout(ASK_TIMEOUT_S),
            "verify": self._tls.context() if address.secure else False,  # making one takes long
        }

    def get_metrics(self) -> str:
        return fetch_metrics(self._metrics_url, self._tls)

    def timeout(self, left_s: float | None) -> httpx.Timeout:
        connect_s = self.connect_timeout_s if left_s is None else min(left_s, self.connect_timeout_s)
        return httpx.Timeout(connect=connect_s, read=left_s, write=left_s, pool=None)

    def post(self, request: WireRequest, left_s: float | None) -> dict[str, Any]:
        """Arguments of httpx's `build_request`."""
        body = {**request.parameters, **request.inputs, "id": request.request_id}
        verb = "generate_stream" if request.streams else "generate"
        return {
            "method": "POST",
            "url": f"{_model_path(request.model, request.version)}/{verb}",
            "content": json.dumps(body).encode(),
            # A compressed stream would be held back until there is enough of it.
            "headers": {"Content-Type": "application/json", "Accept-Encoding": "identity"},
            "timeout": self.timeout(left_s),
        }

    @staticmethod
    def asking(question: Question, model: str, version: str) -> tuple[str, str]:
        """The method and the path of a question."""
        match question:
            case Question.LIVE | Question.READY:
                return "GET", f"/v2/health/{question.value}"
            case Question.MODEL_READY:
                return "GET", f"{_model_path(model, version)}/ready"
            case Question.CONFIG:
                return "GET", f"{_model_path(model, version)}/config"
            case Question.METADATA:
                return "GET", _model_path(model, version)
            case Question.MODELS:
                return "POST", "/v2/repository/index"

    @staticmethod
    def answer(question: Question, response: httpx.Response) -> Mapping[str, Any]:
        if question not in (Question.METADATA, Question.CONFIG, Question.MODELS):
            return {"ready": response.is_success}
        raise_for_status(response.status_code, response.content)
        if question is Question.MODELS:
            return _object(b'{"models": %b}' % response.content)
        return _object(response.content)


class Reading:
    """The replies in the body of one answer, from its bytes as they come."""

    def __init__(self, status: int, streams: bool, deadline: Deadline) -> None:
        self._failed = status >= 400
        self._status = status
        self._events = Events() if streams and not self._failed else None
        self._body: list[bytes] = []
        self._deadline = deadline

    def feed(self, data: bytes) -> Iterator[Reply]:
        if self._deadline.passed:
            raise TimedOut("the answer was not complete in time")
        if self._events is None:
            self._body.append(data)
            return
        for event in self._events.feed(data):  # one by one: the last may be an error
            yield _reply(event)

    def end(self) -> Iterator[Reply]:
        if self._events is None:
            body = b"".join(self._body)
            raise_for_status(self._status, body)
            yield _reply(body)


@contextmanager
def typed_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerUnreachable(f"no connection to the server: {error}") from error
    except httpx.TimeoutException as error:
        raise TimedOut("the server did not answer in time") from error
    except httpx.TransportError as error:
        raise ConnectionLost(f"the connection broke before the end of the answer: {error!r}") from error


def raise_for_status(status: int, body: bytes) -> None:
    if status < 400:
        return
    text = body.decode(errors="replace").strip().removeprefix("data:").strip()
    try:
        message = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        message = text  # a proxy's page, most likely
    raise from_status(status, message[:2000])


def is_settled(response: httpx.Response) -> bool:
    """Whether asking again for the same cancellation would bring nothing new."""
    try:
        raise_for_status(response.status_code, response.content)
    except NotFound:
        return False
    except OctavoError:
        pass  # a server that knows no cancelling by id
    return True


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ProtocolError(f"an answer that is no JSON object: {body[:200]!r}")
    return values


def _reply(body: bytes) -> Reply:
    values = _object(body)
    if "error" in values:
        raise from_message(str(values["error"]))
    outputs = {
        name: value if isinstance(value, list) else [value]
        for name, value in values.items()
        if name not in _ABOUT_THE_REPLY
    }
    return Reply(outputs, values.get("model_name", ""), values.get("model_version", ""))


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
