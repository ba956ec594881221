"""For the tests of the gateway: the application on a server that is a function, asked without a socket."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from octavo_client import MockTransport
from octavo_gateway import Settings, create_app

HELLO = [{"role": "user", "content": "Hello"}]


def asked(mock: MockTransport, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(Settings(**settings), mock), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def chat(**body: Any) -> dict[str, Any]:
    return {"model": "llm", "messages": HELLO, **body}


def completion(**body: Any) -> dict[str, Any]:
    return {"model": "llm", "prompt": "Hello", **body}


def events(text: str) -> list[Any]:
    """The JSON of server-sent events; the last is `[DONE]` as a text."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [json.loads(one) if one.startswith("{") else one for one in data]


@contextmanager
def listening(mock: MockTransport, **settings: Any) -> Iterator[str]:
    """The application in uvicorn, in a thread: its base URL."""
    config = uvicorn.Config(
        create_app(Settings(**settings), mock), ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(10)
