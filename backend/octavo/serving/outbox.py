"""Requests between Triton's `execute` and their final response, and what waits to be sent to them.

Any thread may open a request, put a delta and ask who is open; only the sender thread takes and forgets. It
takes one request at a time, the one whose delta has waited longest, with all that waits for it by then. So
several deltas of a stream become one response when the sender is behind, and only then (32 responses through
Triton cost about as much CPU as a decode step of a small model), and no stream waits for more than one
response to each of the others.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from octavo.errors import OctavoError
from octavo.request import TextDelta
from octavo.serving.codec import Tensors
from octavo.serving.reply import Reply

Operation = Literal["text_completion", "chat", "embeddings"]  # by OpenTelemetry's names


class ResponseSender(Protocol):
    """Triton's. One per request; only the sender thread calls it."""

    def is_cancelled(self) -> bool: ...
    def send(self, response: Any = None, flags: int = 0) -> None: ...


class OpenRequest:
    """A request that has not had its final response. `id` is unique; `client_id`, the client's own, is not.

    `tensors` and `parameters` are what it brought, the tensors dropped once parsed. `operation`,
    `trace_context` (W3C's headers, of the span that it is a part of) and `reply` are set before the engine
    gets it. The rest belongs to the sender thread; times are those of `time.monotonic()`.
    """

    def __init__(self, id: str, sender: ResponseSender) -> None:
        self.id = id
        self.client_id = ""
        self.sender = sender
        self.tensors: Tensors = {}
        self.parameters = ""
        self.operation: Operation = "text_completion"
        self.trace_context: Mapping[str, str] = {}
        self.reply: Reply | None = None
        self.cancel_seen = False
        self.arrived_s = time.monotonic()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_tokens = 0
        self._lock = threading.Lock()  # orders handing over against withdrawing
        self._handed_over = False
        self._withdrawn = False

    def hand_over(self, submit: Callable[[], None]) -> None:
        """Runs `submit`, which gives the request to the engine, unless it was withdrawn before."""
        with self._lock:
            if not self._withdrawn:
                submit()
                self._handed_over = True

    def withdraw(self) -> bool:
        """Whether the engine does not know the request; then it never will."""
        with self._lock:
            self._withdrawn = not self._handed_over
            return self._withdrawn

    @property
    def withdrawn(self) -> bool:
        return self._withdrawn

    @property
    def handed_over(self) -> bool:
        """Whether the engine has, or had, the request."""
        return self._handed_over

    def count_tokens(self, num_tokens: int) -> None:
        """So many tokens were just sent, or kept for the one response of a request without streaming."""
        if num_tokens:
            self.last_token_s = time.monotonic()
            self.first_token_s = self.first_token_s or self.last_token_s
            self.num_tokens += num_tokens

    def __str__(self) -> str:
        return f"{self.id} (client's id {self.client_id[:80]!r})" if self.client_id else self.id


class Outbox:
    """With `coalesce` false every delta is taken by itself, in order of arrival."""

    def __init__(self, coalesce: bool = True) -> None:
        self._coalesce = coalesce
        self._changed = threading.Condition()
        self._waiting: deque[tuple[OpenRequest, list[TextDelta]]] = deque()
        self._joinable: dict[OpenRequest, list[TextDelta]] = {}  # what waits that a further delta may join
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count(1)
        self._woken = False

    def open(self, sender: ResponseSender) -> OpenRequest:
        request = OpenRequest(f"request-{next(self._numbers)}", sender)
        with self._changed:
            self._open[request.id] = request
            self._changed.notify()  # a sender that slept with nobody to ask has somebody now
        return request

    def put(self, request: OpenRequest, delta: TextDelta) -> None:
        with self._changed:
            deltas = self._joinable.get(request)
            if deltas is not None:
                deltas.append(delta)
                return
            deltas = [delta]
            self._waiting.append((request, deltas))
            if self._coalesce:
                self._joinable[request] = deltas
            self._changed.notify()

    def fail(self, request: OpenRequest, error: OctavoError) -> None:
        """Ends a request that the engine does not know, or does not answer any more."""
        self.put(request, TextDelta(request.id, error=error, request_finished=True))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, request: OpenRequest) -> bool:
        return request.id in self._open

    def find(self, request_id: str) -> OpenRequest | None:
        """An open request by its own id, not the client's."""
        return self._open.get(request_id)

    def requests(self) -> list[OpenRequest]:
        with self._changed:
            return list(self._open.values())

    def named(self, client_id: str) -> list[OpenRequest]:
        return [request for request in self.requests() if request.client_id == client_id]

    def wake(self) -> None:
        """Makes `take` return at once: the one that waits, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, timeout_s: float) -> tuple[OpenRequest, list[TextDelta]] | None:
        """What the next response is made of; waits up to `timeout_s` while there is nothing.

        What was put for a request after it was forgotten is dropped.
        """
        with self._changed:
            if not self._waiting and not self._woken:
                self._changed.wait(timeout_s)
            self._woken = False
            while self._waiting:
                request, deltas = self._waiting.popleft()
                self._joinable.pop(request, None)
                if request.id in self._open:
                    return request, deltas
            return None

    def forget(self, request: OpenRequest) -> None:
        """After the final response."""
        with self._changed:
            self._open.pop(request.id, None)
