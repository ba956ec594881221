"""The engine thread. It alone touches the engine; other threads reach it through an inbox.

    other threads --submit, abort, at, stop--> inbox --> engine thread: drain the inbox, then one step

A request that was submitted gets its one final delta whatever happens: a result, its own error, `Cancelled`
after `abort`, `Unavailable` when the loop stops first, or the reason why the engine cannot go on (`failure`).
"""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import OctavoError, Unavailable
from octavo.request import Request, Sink, TextDelta

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

log = logging.getLogger("octavo")

STEP_S = 5.0  # the longest that a step may take when the engine is to stop
_POLL_S = 1.0  # how long an idle engine thread sleeps at most; the inbox wakes it earlier


class EngineLoop:
    """Call `start` once, `stop` once; `submit`, `abort` and `at` from any thread in between."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []  # a heap: time, order, what to do
        self._alarm_numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._lock = threading.Lock()  # orders `submit` against the closing of the inbox
        self._closed: OctavoError | None = None  # why new requests are refused
        self._deadline_s: float | None = None  # set by `stop`: time.monotonic() of the hard end
        self.failure: OctavoError | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, sink: Sink, on_start: Callable[[], None] | None = None) -> None:
        """Hands a request to the engine. Raises what the loop was closed with; then `sink` is never called.

        The sink, and `on_start` when the request's first step begins, run on the engine thread and must
        neither block nor raise.
        """
        with self._lock:
            if self._closed:
                raise self._closed
            self._inbox.put(lambda: self._add(request, sink, on_start))

    def abort(self, request_id: str, error: OctavoError | None = None) -> None:
        """Ends a request with an error, `Cancelled` if none is given; one that is finished or unknown is left
        alone."""
        self._inbox.put(lambda: self._abort(request_id, error))

    def at(self, time_s: float, run: Callable[[], None]) -> None:
        """Has `run` called on the engine thread when `time.monotonic()` is `time_s`, or after the step that
        is under way then; never if the loop ends before. It must neither block nor raise."""
        self._inbox.put(lambda: heapq.heappush(self._alarms, (time_s, next(self._alarm_numbers), run)))

    def stop(self, timeout_s: float) -> None:
        """Refuses new requests, lets those in flight finish for `timeout_s`, answers the rest, joins.

        A step that hangs is not waited for longer than `STEP_S` beyond that; its requests are not answered.
        """
        closed = Unavailable("the server is shutting down; send the request to another one")
        with self._lock:
            self._closed = self._closed or closed
        self._inbox.put(lambda: self._end_at(time.monotonic() + timeout_s))
        if self._thread.ident is not None:
            self._thread.join(timeout_s + STEP_S)
        if self._thread.is_alive():
            log.error("the engine's step hangs; given up after %.0f s", timeout_s + STEP_S)

    def _run(self) -> None:
        try:
            while not self._ended():
                self._drain()
                self._engine.step()
            self._engine.abort_all(Unavailable("the server shut down before the request was done"))
        except Exception as error:
            log.exception("the engine cannot go on")
            self.failure = OctavoError(f"the engine has failed and takes no requests: {error!r}")
            self._refuse_for_good(self.failure)

    def _drain(self) -> None:
        """Runs what is due and what is in the inbox; sleeps on it while there is nothing to compute."""
        while self._alarms and self._alarms[0][0] <= time.monotonic():
            heapq.heappop(self._alarms)[2]()
        try:
            if self._engine.has_work:
                item = self._inbox.get_nowait()
            else:
                item = self._inbox.get(timeout=self._patience_s())
            while True:
                item()
                item = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _patience_s(self) -> float:
        if not self._alarms:
            return _POLL_S
        return min(_POLL_S, max(0.0, self._alarms[0][0] - time.monotonic()))

    def _ended(self) -> bool:
        if self._deadline_s is None:
            return False
        return not self._engine.has_work or time.monotonic() >= self._deadline_s

    def _add(self, request: Request, sink: Sink, on_start: Callable[[], None] | None) -> None:
        try:
            if self.failure:
                raise self.failure
            self._engine.add(request, sink, on_start)
        except OctavoError as error:
            sink(TextDelta(request.id, error=error, request_finished=True))
        except Exception as error:
            log.exception("request %s could not be added", request.id)
            failure = OctavoError(f"the request could not be added: {error!r}")
            sink(TextDelta(request.id, error=failure, request_finished=True))

    def _abort(self, request_id: str, error: OctavoError | None) -> None:
        self._engine.abort(request_id, error)

    def _end_at(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def _refuse_for_good(self, reason: OctavoError) -> None:
        """The engine is in an unknown state: answer everyone, without computing."""
        with self._lock:
            self._closed = reason
        self._engine.answer_all(reason)
        while not self._inbox.empty():
            self._inbox.get()()
