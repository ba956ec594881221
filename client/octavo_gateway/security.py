"""Who may ask, as ASGI middleware: API keys. And what may be said: the size and depth of a body.

Plain ASGI: Starlette's convenient base class puts a queue and two tasks between a stream and its socket.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_gateway.errors import ApiError, ClientGone
from octavo_gateway.settings import Settings

MAX_JSON_DEPTH = 64
_PUBLIC = frozenset({"/", "/health", "/health/ready"})
_PUBLIC_FOLDER = "/page/"  # files, the same for everybody
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # may be alone, and then is no text that could be sent on


class Keys:
    """Lets a request through when it brings one of the keys as `Authorization: Bearer KEY`.

    Digests are compared, all of them and each in constant time, so that neither a key's length nor which one
    fits shows in how long it takes.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_public(scope["path"]) or self._fits(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key: send one as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _fits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == b"bearer"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """The body, an object, without the fields that are null. Raises `ApiError`.

    What says that it is no JSON is refused: such requests are all that a page of another origin could make a
    browser send without asking.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is of type {kind[:80]!r}; send 'Content-Type: application/json'")
    body = await _read(request, settings)
    try:
        text = body.decode("utf-8-sig")
        values = json.loads(text, parse_constant=_refuse)
        if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and _is_deeper(values, MAX_JSON_DEPTH):
            raise RecursionError
        if _HALF.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, f"the body is JSON nested too deeply; allowed: {MAX_JSON_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is JSON, but no object")
    return {name: value for name, value in values.items() if value is not None}


async def _read(request: Request, settings: Settings) -> bytes:
    limit = settings.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body was not here after {settings.body_timeout_s:g} s",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes, which is this gateway's limit (--max-body-bytes)",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not JSON")


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDER)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
