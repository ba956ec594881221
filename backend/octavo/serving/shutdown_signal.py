"""Notices that the server is told to end, while it still waits for its requests to finish.

Triton unloads a model only after the model's last response, and gives up, crashing, when that comes later
than its own deadline. Its Python backend passes no word of the shutdown on, but a model's process is in the
server's process group, so a signal to the group (Ctrl-C, the launcher, most supervisors) reaches it as well.
"""

import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("octavo")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignal:
    """Runs `react` once, on a thread of its own, when SIGTERM or SIGINT comes. Main thread only.

    The main thread of a model's process sits in C++ code where no Python handler runs, hence the wake-up
    socket, which the interpreter's C handler writes to.
    """

    def __init__(self, react: Callable[[], None]) -> None:
        self._react = react
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="octavo-shutdown", daemon=True)
        self._old_handlers: dict[int, Any] = {}
        self._old_fd = -1

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning("not loaded on the main thread: a signal will not shorten the server's shutdown")
            return
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        self._thread.start()

    def close(self) -> None:
        """Puts the old handlers back and waits for a `react` that is running."""
        if self._old_handlers:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_IGN)
            signal.set_wakeup_fd(self._old_fd)
            self._writer.send(b"\0")
            self._thread.join()
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        while (number := self._reader.recv(1)[0]) != 0:
            if number in _SIGNALS:
                self._react()
                return


def _ignore(number: int, frame: FrameType | None) -> None:
    """The server decides when this process ends."""
