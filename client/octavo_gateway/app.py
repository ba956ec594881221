"""The application: its routes, and what all of them share. `create_app` is for `cli` and for tests."""

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo_client import (
    AsyncClient,
    AsyncTransport,
    ChatOptions,
    Metrics,
    NotFound,
    OctavoError,
    Retries,
)
from octavo_gateway import errors
from octavo_gateway.answers import EventStream, JSONAnswer, unless_gone
from octavo_gateway.chat import Chat
from octavo_gateway.completions import Completions
from octavo_gateway.embeddings import embed
from octavo_gateway.errors import CLIENT_GONE, ApiError, ClientGone
from octavo_gateway.page import page_router
from octavo_gateway.schemas import ChatBody, CompletionBody, EmbeddingBody, parse
from octavo_gateway.security import Keys, read_json
from octavo_gateway.settings import Settings

log = logging.getLogger("octavo.gateway")

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Gateway:
    """What the routes work with. Its client belongs to the event loop that serves. Raises ValueError."""

    def __init__(self, settings: Settings, transport: AsyncTransport | None) -> None:
        self.settings = settings
        self.started = int(time.time())
        # One try: OpenAI's clients try again themselves, and tries would multiply.
        self.client = AsyncClient(
            settings.url,
            metrics_url=settings.metrics_url,
            timeout_s=settings.timeout_s,
            retries=Retries(attempts=1),
            transport=transport,
        )

    def client_of(self, model: str) -> AsyncClient:
        return self.client.for_model(self.settings.aliases.get(model, model))

    async def metrics(self) -> Metrics:
        return await self.client.metrics()

    async def models(self) -> list[str]:
        """The names under which the models that are ready can be asked."""
        ready = sorted({state.name for state in await self.client.models() if state.ready})
        aliases = [alias for alias, name in self.settings.aliases.items() if name in ready]
        return [*aliases, *(name for name in ready if name not in aliases)]

    async def is_ready(self) -> bool:
        """Whether a model takes requests. Triton's own word on it can be too good: where a server cannot ask
        the model, a metric says it."""
        try:
            names = {state.name for state in await self.client.models() if state.ready}
        except OctavoError:
            return False
        try:
            said = (await self.client.metrics()).select("octavo:ready")
        except OctavoError:
            return bool(names)
        doubted = {sample.labels.get("model") for sample in said}
        fine = {sample.labels.get("model") for sample in said if sample.value}
        return bool((names - doubted) | (names & fine))


def create_app(settings: Settings, transport: AsyncTransport | None = None) -> FastAPI:
    """`transport` replaces the connection to the server, for tests."""
    gateway = Gateway(settings, transport)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await gateway.client.close()

    app = FastAPI(title="Octavo", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_routes(app, gateway)
    app.include_router(page_router(gateway.metrics))
    if settings.api_keys:
        app.add_middleware(Keys, keys=settings.api_keys)
    if settings.allow_origins:  # added last, so it is outermost: a browser asks it without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    settings = gateway.settings

    @app.get("/health")
    async def health() -> Response:
        return JSONAnswer({"status": "alive"})

    @app.get("/health/ready")
    async def ready() -> Response:
        is_ready = await gateway.is_ready()
        return JSONAnswer({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        listed = [_model(name, gateway.started) for name in await gateway.models()]
        return JSONAnswer({"object": "list", "data": listed})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in await gateway.models():
            raise NotFound(f"no model {name[:80]!r} is ready here")
        return JSONAnswer(_model(name, gateway.started))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        values = await read_json(request, settings)
        body = parse(ChatBody, values)
        asked = Chat(body, gateway.client_of(body.model), _options(request, body), settings.tool_parser)
        return await _answer(request, body.stream, asked, values)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        values = await read_json(request, settings)
        body = parse(CompletionBody, values)
        asked = Completions(body, gateway.client_of(body.model), _options(request, body), settings.max_inputs)
        return await _answer(request, body.stream, asked, values)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        values = await read_json(request, settings)
        body = parse(EmbeddingBody, values)
        work = embed(body, gateway.client_of(body.model), _options(request, body), settings.max_inputs)
        try:
            return JSONAnswer(await unless_gone(request.receive, work), headers=_headers(request))
        except OctavoError as error:
            raise errors.of(error, values) from error


async def _answer(
    request: Request, stream: bool, asked: Chat | Completions, values: dict[str, Any]
) -> Response:
    """`values`: the body, whose fields an error may be about."""
    if stream:
        return EventStream(asked.events(), lambda error: errors.of(error, values), _headers(request))
    try:
        return JSONAnswer(await unless_gone(request.receive, asked.run()), headers=_headers(request))
    except OctavoError as error:
        raise errors.of(error, values) from error


def _options(request: Request, body: ChatBody | CompletionBody | EmbeddingBody) -> ChatOptions:
    request.state.request_id = uuid.uuid4().hex
    options: ChatOptions = {"request_id": request.state.request_id}
    if body.priority is not None:
        options["priority"] = body.priority
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    if body.tenant is not None:
        options["tenant"] = body.tenant
    trace = request.headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(trace):
        options["traceparent"] = trace
    return options


def _headers(request: Request) -> dict[str, str]:
    return {"x-request-id": request.state.request_id}


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "octavo"}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(OctavoError)
    async def octavo_error(_: Request, error: OctavoError) -> Response:
        return errors.of(error).response()

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = "there is no" if error.status_code == 404 else "not allowed:"
        message = f"{what} {request.method} {request.url.path[:200]}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def surprise(_: Request, error: Exception) -> Response:
        del error  # the server logs it
        return ApiError(500, "the gateway failed at it; its log says more").response()
