"""The link to the process that sends the requests (`load_sender.py`): start it, ask it, stop it.

Plain threads and pipes. In Locust's process gevent has replaced both, so that a waiting user costs a
greenlet.
"""

import contextlib
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_workloads import Job

_SENDER = Path(__file__).with_name("load_sender.py")
_START_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request. Times are of `time.monotonic()`; `token_times_s` of responses with tokens."""

    started_s: float
    ended_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: tuple[str, str] | None  # its code and text


class SenderLost(RuntimeError):
    """The process has ended by itself."""


class Link:
    """`on_metrics(at_s, values)` is called from the reading thread."""

    def __init__(
        self,
        urls: Mapping[str, str],
        model: str,
        timeout_s: float,
        metrics_url: str | None,
        on_metrics: Callable[[float, Mapping[str, float]], None],
    ) -> None:
        """Raises ValueError for a URL that is none."""
        self._on_metrics = on_metrics
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(_SENDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for Locust, which lets requests end
        )
        self._greeting: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write({"urls": dict(urls), "model": model, "timeout_s": timeout_s, "metrics_url": metrics_url})
        try:
            greeting = self._greeting.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            greeting = {"refused": "the sending process did not start in time"}
        if "refused" in greeting:
            self.close()
            raise ValueError(greeting["refused"])

    def ask(self, transport: str, job: Job) -> Answer:
        """Waits for the end. A greenlet that is killed meanwhile cancels the request. Raises `SenderLost`."""
        request_id = next(self._ids)
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._waiting[request_id] = answers
        content = {"prompt": job.prompt} if job.prompt is not None else {"messages": job.messages}
        try:
            self._write(
                {
                    "id": request_id,
                    "transport": transport,
                    "max_tokens": job.max_tokens,
                    "ignore_eos": job.ignore_eos,
                    **content,
                }
            )
            answer = answers.get()
        except BaseException:
            self._waiting.pop(request_id, None)
            with contextlib.suppress(SenderLost):
                self._write({"cancel": request_id})
            raise
        if answer is None:
            raise SenderLost("the sending process has ended")
        return answer

    def close(self) -> None:
        """Requests that run are cancelled."""
        process = self._process
        with contextlib.suppress(OSError), self._lock:
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join(_EXIT_TIMEOUT_S)
        process.stdout.close()  # type: ignore[union-attr]

    def _write(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._process.stdin.write(line)  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]
        except (OSError, ValueError) as error:
            raise SenderLost("the sending process has ended") from error

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            message = json.loads(line)
            if "metrics" in message:
                self._on_metrics(message["at_s"], message["metrics"])
            elif "id" in message:
                if waiting := self._waiting.pop(message.pop("id"), None):
                    error = message.pop("error")
                    times = tuple(message.pop("token_times_s"))
                    waiting.put(Answer(token_times_s=times, error=error and tuple(error), **message))
            else:
                self._greeting.put(message)
        self._greeting.put({"refused": "the sending process has ended"})
        for waiting in list(self._waiting.values()):
            waiting.put(None)
