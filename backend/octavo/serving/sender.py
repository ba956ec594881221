"""The one thread that talks back to Triton: responses, cancellations, metrics.

A response is a blocking handshake with the server, so the engine's thread never makes one: it puts deltas
into the outbox. Every open request gets exactly one final response from here, whatever happens. How one is
sent comes from `tritonserver`, the only file that knows Triton's module.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from octavo.errors import OctavoError, Unavailable
from octavo.request import TextDelta
from octavo.serving.codec import Tensors
from octavo.serving.ended_request import EndedRequest
from octavo.serving.outbox import OpenRequest, Outbox

log = logging.getLogger("octavo")

_SWEEP_S = 0.05  # from one round of asking who was cancelled to the next, at least
_SWEEP_SHARE = 0.1  # of the thread's time that asking takes: a round trip of 0.04 ms for each request
_SLOWEST_SWEEP_S = 0.12  # but no later than so, since who is cancelled is to be gone within 0.2 s
_ASKED_AT_ONCE = 4  # between two responses
_TICK_S = 1.0  # between two calls of `on_tick`


class Channel(Protocol):
    """Triton's side of a request. Any of these may raise."""

    def send(self, request: OpenRequest, tensors: Tensors, final: bool) -> None: ...
    def send_error(self, request: OpenRequest, error: OctavoError) -> None: ...
    def is_cancelled(self, request: OpenRequest) -> bool: ...


class Sender:
    """`cancel` ends a request that the client gave up, wherever it is; it answers through the outbox.

    `on_done` gets every request after its final response, and must be quick. `on_tick` is called about once a
    second. `num_coalesced` counts the deltas of streams that joined an earlier one of their sequence in its
    response.
    """

    def __init__(
        self,
        outbox: Outbox,
        channel: Channel,
        *,
        cancel: Callable[[OpenRequest], None],
        on_done: Callable[[EndedRequest], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._channel = channel
        self._cancel = cancel
        self._on_done = on_done
        self._on_tick = on_tick
        self._next_tick_s = 0.0
        self._round_s = 0.0  # when this round began
        self._next_sweep_s = 0.0
        self._to_ask: list[OpenRequest] = []  # what is left of this round
        self._asking_s = 0.0  # that this round has cost
        self.num_coalesced = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="octavo-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Sends what is waiting, answers whoever is left with `Unavailable`, joins."""
        self._stopped = True
        self._outbox.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the server takes no responses; given up after %.0f s", timeout_s)

    def _run(self) -> None:
        while not self._stopped:
            self._send_next(self._patience_s())
            for _ in range(_ASKED_AT_ONCE):
                self._guard("looking for cancelled requests", self._ask_one)
            self._guard("updating the metrics", self._tick)
        self._send_all()
        for request in self._outbox.requests():
            self._outbox.fail(request, Unavailable("the model was unloaded before the request was done"))
        self._send_all()
        self._guard("updating the metrics", self._on_tick)

    def _patience_s(self) -> float:
        """How long there is nothing to do but to wait for deltas."""
        if self._to_ask:
            return 0.0
        due_s = min(self._next_tick_s, self._next_sweep_s) if self._outbox.num_open else self._next_tick_s
        return max(0.0, due_s - time.monotonic())

    def _send_all(self) -> None:
        while self._send_next(0):
            pass

    def _send_next(self, timeout_s: float) -> bool:
        """Whether anything was waiting."""
        taken = self._outbox.take(timeout_s)
        if taken is None:
            return False
        request, deltas = taken
        try:
            self._answer(request, deltas)
        except Exception as error:
            log.exception("request %s: its response could not be sent", request)
            self._give_up(request, error)
        return True

    def _answer(self, request: OpenRequest, deltas: list[TextDelta]) -> None:
        """One response for all of them. An error makes what waits before it pointless."""
        last = next((delta for delta in deltas if delta.request_finished), deltas[-1])
        if last.error is not None:
            self._channel.send_error(request, last.error)
            self._end(request, last.error)
            return
        assert request.reply is not None
        for delta in deltas:
            request.reply.add(delta)
        tensors = request.reply.take()
        if tensors is not None:
            self._channel.send(request, tensors, final=last.request_finished)
        if len(deltas) > 1 and request.reply.streams:
            self.num_coalesced += len(deltas) - len({delta.index for delta in deltas})
        request.count_tokens(sum(len(delta.token_ids) for delta in deltas))
        if last.request_finished:
            self._end(request, None)

    def _end(self, request: OpenRequest, error: OctavoError | None) -> None:
        """After the final response."""
        self._outbox.forget(request)
        ended = EndedRequest(request, error, time.monotonic())
        self._guard("recording a request", lambda: self._on_done(ended))

    def _give_up(self, request: OpenRequest, error: Exception) -> None:
        """The client cannot be served any more: free what it holds, and close Triton's side."""
        self._cancel(request)
        failure = OctavoError(f"the response could not be sent: {error!r}")
        try:
            self._channel.send_error(request, failure)
        except Exception as second:
            log.info("request %s: its final response could not be sent either: %r", request, second)
        self._end(request, failure)

    def _ask_one(self) -> None:
        """Asks the server whether the next request of this round was cancelled; begins a round that is due.

        Few at a time, so that tokens do not wait for a round over a thousand requests.
        """
        started_s = time.monotonic()
        if not self._to_ask:
            if started_s < self._next_sweep_s:
                return
            self._to_ask = self._outbox.requests()
            self._round_s, self._asking_s = started_s, 0.0
        request = self._to_ask.pop() if self._to_ask else None
        if request and self._outbox.is_open(request) and not request.cancel_seen:
            self._ask(request)
        now_s = time.monotonic()
        self._asking_s += now_s - started_s
        if not self._to_ask:
            # From its beginning: no pause follows a round that took long, with a response between any two.
            pause_s = min(self._asking_s / _SWEEP_SHARE, _SLOWEST_SWEEP_S)
            self._next_sweep_s = self._round_s + max(_SWEEP_S, pause_s)

    def _ask(self, request: OpenRequest) -> None:
        try:
            request.cancel_seen = self._channel.is_cancelled(request)
        except Exception as error:
            log.exception("request %s: the server does not know it any more", request)
            self._give_up(request, error)
        if request.cancel_seen:
            self._cancel(request)

    def _tick(self) -> None:
        if time.monotonic() >= self._next_tick_s:
            self._next_tick_s = time.monotonic() + _TICK_S
            self._on_tick()

    def _guard(self, what: str, run: Callable[[], None]) -> None:
        """This thread outlives every surprise."""
        try:
            run()
        except Exception:
            log.exception("%s failed", what)
