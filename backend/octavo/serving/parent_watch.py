"""Ends a model's process when the server that it belongs to has died.

Triton's own watch for that can wait for a lock which a thread of the process holds while it asks the dead
server something, such as whether a request was cancelled; the process, its memory and its shared memory would
then stay for ever.
"""

import os
import threading

_PERIOD_S = 1.0


class ParentWatch:
    """`start` and `close` once each. The process ends at once: nobody is left to answer."""

    def __init__(self) -> None:
        self._server = os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-parent-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            if os.getppid() != self._server:
                os._exit(1)
