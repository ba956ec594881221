"""An HTTP server of a few lines of sockets, for tests of clients: it does what no HTTP server would."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def answer(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


class Request:
    def __init__(self, head: str, body: bytes) -> None:
        self.line, *lines = head.split("\r\n")
        self.headers = dict(line.lower().split(": ", 1) for line in lines if line)
        self.body: dict[str, Any] = json.loads(body) if body else {}

    @property
    def is_cancellation(self) -> bool:
        return "cancel_request_id" in self.body


Script = Callable[[Request, socket.socket], bool | None]  # False closes the connection


class Server:
    """Each request goes to `script`, but for cancellations, which are answered and kept."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.cancellation = answer(b'{"text_output":""}')
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while (request := self._read(stream)) is not None:
                    if request.is_cancellation:
                        self.cancelled.append(request.body["cancel_request_id"])
                        connection.sendall(self.cancellation)
                        continue
                    self.requests.append(request)
                    if self.script(request, connection) is False:
                        connection.shutdown(socket.SHUT_RDWR)
                        return
        except (OSError, ValueError):  # the client has gone, or the test is over
            pass

    @staticmethod
    def _read(stream: Any) -> Request | None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = stream.readline()
            if not line:
                return None
            head += line
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ),
            0,
        )
        return Request(head.decode().strip(), stream.read(length))


def sends(*parts: bytes, close: bool = False, pause_s: float = 0.0) -> Script:
    def script(request: Request, connection: socket.socket) -> bool | None:
        del request
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        return False if close else None

    return script
