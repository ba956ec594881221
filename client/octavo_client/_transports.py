"""How requests travel: the interface of a transport, the choice of one by URL, and one for tests.

The transports themselves, in `_http` and `_grpc`, are imported when a client is made, since their libraries
are slow to import and the command line begins with this package.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from octavo_client._base import Address, Deadline, Question, WireRequest
from octavo_client._errors import OctavoError
from octavo_client._replies import Reply
from octavo_client._types import TLS


class Exchange(Protocol):
    """A request on its way, and its replies as they come. Used by one thread."""

    def __next__(self) -> Reply:
        """Raises StopIteration after the last reply, and `OctavoError`."""

    def leave(self) -> None:
        """No more is wanted: ends the request on the server if it runs, and never raises for that."""


class AsyncExchange(Protocol):
    @property
    def waiting(self) -> bool:
        """Whether something has come that was not taken yet; False where that is not known."""

    async def __anext__(self) -> Reply: ...
    async def aleave(self) -> None: ...


class Transport(Protocol):
    """Shared by threads."""

    def send(self, request: WireRequest, deadline: Deadline) -> Exchange: ...
    def ask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        """`{"ready": bool}` to the first three questions, the server's JSON to the others, and a list of that
        as `{"models": [...]}`."""

    def metrics(self) -> str: ...
    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Belongs to one event loop."""

    async def asend(self, request: WireRequest, deadline: Deadline) -> AsyncExchange: ...
    async def aask(self, question: Question, model: str, version: str) -> Mapping[str, Any]: ...
    async def ametrics(self) -> str: ...
    async def aclose(self) -> None: ...


def connect(
    address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
) -> Transport:
    if address.transport == "http":
        from octavo_client._http import HttpTransport

        return HttpTransport(address, headers, tls, connect_timeout_s)
    from octavo_client._grpc import GrpcTransport

    return GrpcTransport(address, headers, tls, connect_timeout_s)


def connect_async(
    address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
) -> AsyncTransport:
    if address.transport == "http":
        from octavo_client._http import AsyncHttpTransport

        return AsyncHttpTransport(address, headers, tls, connect_timeout_s)
    from octavo_client._grpc import AsyncGrpcTransport

    return AsyncGrpcTransport(address, headers, tls, connect_timeout_s)


class MockTransport:
    """A server made of a function, for tests of what uses a client: `Client(transport=MockTransport(f))`.

    `answer(request)` returns a text, or several as deltas, each of one token, the last with the finish reason
    "stop"; or `Reply` objects, tensors by name as the server would send them; or raises an `OctavoError`.
    It may be a generator. A request that does not stream gets deltas as one text. Serves both twins.

    `requests` are those that came, in order; `left` the ids of those whose client left before the end.
    """

    def __init__(
        self,
        answer: Callable[[WireRequest], str | Iterable[str | Reply]],
        *,
        ready: bool = True,
        metadata: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: str = "",
        models: Iterable[Mapping[str, str]] | None = None,
    ) -> None:
        self._answer = answer
        self._ready = ready
        self._metadata = metadata
        self._config = config or {}
        self._metrics = metrics
        state = "READY" if ready else "UNAVAILABLE"
        self._models = list(models or [{"name": "llm", "version": "1", "state": state}])
        self.requests: list[WireRequest] = []
        self.left: list[str] = []

    def send(self, request: WireRequest, deadline: Deadline) -> "_MockExchange":
        del deadline
        self.requests.append(request)
        return _MockExchange(self._replies(request), request, self.left)

    async def asend(self, request: WireRequest, deadline: Deadline) -> "_MockExchange":
        return self.send(request, deadline)

    def ask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        del version
        match question:
            case Question.METADATA:
                return self._metadata or {"name": model, "versions": ["1"], "inputs": [], "outputs": []}
            case Question.CONFIG:
                return self._config
            case Question.MODELS:
                return {"models": self._models}
            case _:
                return {"ready": self._ready}

    async def aask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        return self.ask(question, model, version)

    def metrics(self) -> str:
        return self._metrics

    async def ametrics(self) -> str:
        return self._metrics

    def close(self) -> None:
        """Nothing is open."""

    async def aclose(self) -> None:
        """Nothing is open."""

    def _replies(self, request: WireRequest) -> Iterator[Reply]:
        answer = self._answer(request)
        parts = iter((answer,) if isinstance(answer, str) else answer)
        if not request.streams:
            yield from _at_once(request, parts)
            return
        # One ahead, since the last one is told from the others; what fails there comes after what was before.
        waiting = next(parts, None)
        while waiting is not None:
            part, failure = waiting, None
            try:
                waiting = next(parts, None)
            except OctavoError as error:
                failure = error
            last = waiting is None and failure is None
            yield part if isinstance(part, Reply) else _reply(request, part, 1, last)
            if failure is not None:
                raise failure


def _at_once(request: WireRequest, parts: Iterator[str | Reply]) -> Iterator[Reply]:
    texts = []
    for part in parts:
        if isinstance(part, Reply):
            yield part
        else:
            texts.append(part)
    if texts:
        yield _reply(request, "".join(texts), len(texts), True)


def _reply(request: WireRequest, text: str, num_tokens: int, last: bool) -> Reply:
    outputs: dict[str, list[Any]] = {"text_output": [text]}
    if "embedding_request" not in request.inputs:
        outputs |= {"finish_reason": ["stop" if last else "None"], "num_output_tokens": [num_tokens]}
    return Reply(outputs, request.model, request.version or "1")


class _MockExchange:
    waiting = False

    def __init__(self, replies: Iterator[Reply], request: WireRequest, left: list[str]) -> None:
        self._replies = replies
        self._request = request
        self._left = left
        self._ended = False

    def __next__(self) -> Reply:
        try:
            return next(self._replies)
        except (StopIteration, OctavoError):
            self._ended = True
            raise

    def leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._left.append(self._request.request_id)

    async def __anext__(self) -> Reply:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aleave(self) -> None:
        self.leave()
