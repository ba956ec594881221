"""Ends a model's process when the server that it belongs to has died.

Triton's own watch for that can wait for a lock which a thread of the process holds while it asks the dead
server something, such as whether a request was cancelled; and a thread that writes a metric keeps Python's
own lock while it waits for the server. The process, its memory and its shared memory would then stay for
ever, with no thread of ours able to run. So a small process beside it watches.
"""

import os
import signal
import subprocess
import sys

# Looks once a second. The signals that end a server go to its whole process group: the model's last requests
# are finished after them.
_WATCHER = """
import os, signal, sys, time
model, server = int(sys.argv[1]), sys.argv[2]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while os.getppid() == model:
    try:
        with open(f"/proc/{model}/stat") as stat:
            parent = stat.read().rpartition(")")[2].split()[1]
        if parent != server:
            os.kill(model, signal.SIGKILL)
    except OSError:
        break
    time.sleep(1)
"""


class ParentWatch:
    """`start` and `close` once each. The process is killed: nobody is left to answer."""

    def __init__(self) -> None:
        self._server = os.getppid()
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-ISc", _WATCHER, str(os.getpid()), str(self._server)]
        self._watcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.send_signal(signal.SIGKILL)
            self._watcher.wait()
