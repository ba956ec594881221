"""The page at `/`: its files, and `/live`, the stream of what the engine does.

`page_router` is all that the application takes from here. The files lie in the folder `page` and are sent as
they are: no build step, no other host. A browser asks for each again and gets 304 where it has the newest.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from octavo_client import Metrics
from octavo_gateway.errors import ApiError
from octavo_gateway.live import MOST_VIEWERS, Broadcast

FOLDER = Path(__file__).with_name("page")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _File:
    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._media_type = _MEDIA_TYPES[path.suffix]
        self._etag = f'"{blake2b(self._content, digest_size=12).hexdigest()}"'

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._etag}
        known = request.headers.get("if-none-match", "")
        # A proxy that compresses makes the tag a weak one.
        if known == "*" or self._etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._media_type, headers=headers)


def page_router(fetch_metrics: Callable[[], Awaitable[Metrics]]) -> APIRouter:
    """`/`, `/page/...` and `/live`. `fetch_metrics` is `AsyncClient.metrics`, or does as it does.

    Where keys are wanted, `/live` wants one too; the page itself holds no secret, and has to be there to ask
    for the key.
    """
    router = APIRouter(include_in_schema=False)
    files = {path.name: _File(path) for path in FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}
    broadcast = Broadcast(fetch_metrics)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return files["index.html"].response(request)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            return ApiError(404, f"the page has no file {name[:80]!r}", headers=_HEADERS).response()
        return files[name].response(request)

    @router.get("/live")
    async def live(request: Request) -> Response:
        if broadcast.is_full:
            message = f"{MOST_VIEWERS} pages look at the engine already, which is all; close one of them"
            return ApiError(503, message, headers=_HEADERS).response()
        return StreamingResponse(
            _events(broadcast, getattr(request.app.state, "is_stopping", lambda: False)),
            media_type="text/event-stream",
            headers={**_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return router


async def _events(broadcast: Broadcast, is_stopping: Callable[[], bool]) -> AsyncGenerator[str, None]:
    """Until the viewer goes, or the program stops: uvicorn waits for every response to end."""
    async with aclosing(broadcast.views()) as views:
        async for view in views:
            if is_stopping():
                return
            yield f"data: {view}\n\n"
