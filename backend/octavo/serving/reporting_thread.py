"""The thread on which the server and its operators are told things: metrics, the request log, spans.

A metric's value is a round trip to the server, some 0.1 ms, and a request or a step has several; a log may be
a pipe that is full. On the sender's thread all streams would wait for each of them. Made by `reporting`; any
thread may `put`.
"""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("octavo")

_MOST_WAITING = 20_000  # a server that takes nothing for so long is hung, and gets no more of it


class ReportingThread:
    """`start` once, `put` from then on, `stop` once."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-reporting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, write: Callable[[], object]) -> None:
        """Runs `write` after all that was put before it. Never blocks, never raises."""
        if self._work.qsize() < _MOST_WAITING:
            self._work.put(write)

    def stop(self, timeout_s: float) -> None:
        """Writes what is waiting and joins."""
        self._work.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (write := self._work.get()) is not None:
            try:
                write()
            except Exception:
                log.exception("a metric, a log line or a span could not be written")
