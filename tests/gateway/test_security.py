"""Keys, limits, origins, statuses, and who may be let in where."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from gateways import asked, chat
from octavo_client import (
    Cancelled,
    ConnectionLost,
    InternalError,
    MockTransport,
    NotFound,
    OctavoError,
    PermissionDenied,
    ServerUnreachable,
    TimedOut,
    Unavailable,
    Unsupported,
)
from octavo_client.cli import main
from octavo_gateway import Settings, errors
from octavo_gateway.security import is_loopback

JSON = {"Content-Type": "application/json"}
PATH = "/v1/chat/completions"


def ask(method: str, path: str, settings: dict[str, Any] | None = None, **request: Any) -> Any:
    async def run() -> Any:
        async with asked(MockTransport(lambda _: "Hi"), **(settings or {})) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer three", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        ("one", 401),
        (None, 401),
    ],
)
def test_a_key_lets_in(header: str | None, status: int) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = ask("GET", "/v1/models", {"api_keys": ("one", "two")}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_what_needs_no_key_and_what_does() -> None:
    keys = {"api_keys": ("one",)}
    for path in ("/health", "/health/ready", "/"):
        assert ask("GET", path, keys).status_code == 200
    for path in ("/live", "/v1/nothing", "/openapi.json", "/health/"):
        assert ask("GET", path, keys).status_code == 401
    assert ask("POST", PATH, keys, json=chat()).status_code == 401


def test_no_origin_is_allowed_unless_it_is_named() -> None:
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in ask("GET", "/health", headers=asking).headers
    settings = {"allow_origins": ("https://a.example",), "api_keys": ("one",)}
    allowed = ask("OPTIONS", PATH, settings, headers=asking)
    assert allowed.status_code == 200  # without a key: a browser sends none there
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = ask("OPTIONS", PATH, settings, headers={**asking, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 100


@pytest.mark.parametrize(
    ("content", "headers", "status", "text"),
    [
        (b"{}" + b" " * 1000, JSON, 413, "larger than 1000 bytes"),
        (pieces(11), JSON, 413, "larger than 1000 bytes"),
        (b"{", JSON, 400, "not valid JSON"),
        (b"\xff", JSON, 400, "not valid JSON"),
        (b'{"a": NaN}', JSON, 400, "NaN is not JSON"),
        (b"[]", JSON, 400, "no object"),
        (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", JSON, 400, "nested too deeply"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "send 'Content-Type: application/json'"),
        (b"{}", {}, 415, "application/json"),
    ],
)
def test_bodies_that_are_refused(content: Any, headers: dict[str, str], status: int, text: str) -> None:
    response = ask("POST", PATH, {"max_body_bytes": 1000}, content=content, headers=headers)
    assert response.status_code == status
    assert text in response.json()["error"]["message"]


def test_a_depth_that_no_parser_survives_is_refused_too() -> None:
    content = b'{"a":' + b"[" * 500_000
    response = ask("POST", PATH, content=content, headers=JSON)
    assert response.status_code == 400


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    response = ask("POST", PATH, {"body_timeout_s": 0.05}, content=slow(), headers=JSON)
    assert response.status_code == 408


def test_unknown_paths_and_methods_answer_in_the_same_shape() -> None:
    assert ask("GET", "/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert ask("GET", PATH).status_code == 405
    assert "error" in ask("GET", PATH).json()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("Request for unknown model: 'x' is not found"), 404, "model_not_found"),
        (NotFound("no adapter 'x'"), 404, "not_found"),
        (Unavailable("3 requests wait already, and max_queue_size is 3"), 429, "queue_full"),
        (Unavailable("shutting down"), 503, "unavailable"),
        (ServerUnreachable("no connection"), 503, "unavailable"),
        (ConnectionLost("broke"), 502, "unavailable"),
        (TimedOut("late"), 504, "unavailable"),
        (Cancelled("by its id"), 499, "cancelled"),
        (Unsupported("no such thing"), 400, "unsupported"),
        (PermissionDenied("a header"), 403, "permission_denied"),
        (InternalError("oh"), 500, "internal"),
    ],
)
def test_statuses(error: OctavoError, status: int, code: str) -> None:
    found = errors.of(error)
    assert (found.status, found.code) == (status, code)
    assert ("Retry-After" in found.headers) is (status in (429, 503))


def test_a_mistake_of_ours_is_a_500_without_its_details() -> None:
    def answer(_: Any) -> str:
        raise KeyError("secret")

    async def run() -> Any:
        async with asked(MockTransport(answer)) as client:
            return await client.post(PATH, json=chat()), await client.post(PATH, json=chat(stream=True))

    for response in asyncio.run(run()):
        assert response.status_code == 500
        assert "secret" not in response.text


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it
    assert not is_loopback("example.org")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--no-api-keys", "--api-key", "k"], "leave one of them out"),
        (["ftp://x"], "is no server's URL"),
        (["--tool-parser", "x"], "no tool parser 'x'"),
        (["--alias", "x"], "is no NAME=MODEL"),
    ],
)
def test_the_command_refuses_to_start(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["octavo", "gateway", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_keys_come_from_all_three_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []

    def create(settings: Settings) -> FastAPI:
        started.append(settings)
        return FastAPI()

    def run(server: uvicorn.Server) -> None:
        started.append(server.config)
        server.started = True

    monkeypatch.setattr("octavo_gateway.cli.create_app", create)
    monkeypatch.setattr("octavo_gateway.cli.uvicorn.Server.run", run)
    monkeypatch.setenv("OCTAVO_API_KEYS", "c, d")
    file = tmp_path / "keys"
    file.write_text("# mine\nb\n\n")
    arguments = ["--host", "0.0.0.0", "--api-key", "a", "--api-keys-file", str(file)]
    monkeypatch.setattr("sys.argv", ["octavo", "gateway", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 0
    settings, config = started
    assert settings.api_keys == ("a", "b", "c", "d")
    assert "'a'" not in repr(settings)
    assert config.host == "0.0.0.0"
