"""Triton over HTTP: `/generate`, and `/generate_stream` with server-sent events. Sync and async, by httpx.

A server sees that a client has gone at its next write only, so whoever leaves first cancels by the id.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from octavo_client._base import CANCEL_PAUSE_S, CANCEL_TIMEOUT_S, Address, Deadline, Question, WireRequest
from octavo_client._errors import OctavoError, TimedOut
from octavo_client._http_messages import HttpMessages, Reading, is_settled, typed_errors
from octavo_client._replies import Reply
from octavo_client._types import TLS

_CANCEL_TRIES = 5  # a request that no instance has is done, most likely: over HTTP that cannot be seen


class HttpTransport:
    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        self._http = HttpMessages(address, headers, tls, connect_timeout_s)
        self._client = httpx.Client(**self._http.settings)

    def send(self, request: WireRequest, deadline: Deadline) -> "_Exchange":
        return _Exchange(self, request, deadline)

    def ask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        with typed_errors():
            response = self._client.request(*self._http.asking(question, model, version))
        return self._http.answer(question, response)

    def metrics(self) -> str:
        return self._http.get_metrics()

    def close(self) -> None:
        self._client.close()

    def open(self, request: WireRequest, deadline: Deadline) -> httpx.Response:
        """Its body is not read yet."""
        with typed_errors():
            built = self._client.build_request(**self._http.post(request, deadline.left_s))
            return self._client.send(built, stream=True)

    def cancel(self, request: WireRequest) -> None:
        """Best effort."""
        asking = self._http.post(request.cancelling(), CANCEL_TIMEOUT_S)
        for _ in range(_CANCEL_TRIES):
            with suppress(httpx.HTTPError):
                if is_settled(self._client.request(**asking)):
                    return
            time.sleep(CANCEL_PAUSE_S)


class _Exchange:
    def __init__(self, transport: HttpTransport, request: WireRequest, deadline: Deadline) -> None:
        self._transport = transport
        self._request = request
        self._deadline = deadline
        self._response: httpx.Response | None = None
        self._ended = False
        self._replies = self._read()

    def __next__(self) -> Reply:
        return next(self._replies)

    def leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._transport.cancel(self._request)
        self._replies.close()
        if self._response is not None:
            self._response.close()

    def _read(self) -> Generator[Reply]:
        try:
            self._response = response = self._transport.open(self._request, self._deadline)
            reading = Reading(response.status_code, self._request.streams, self._deadline)
            with typed_errors():
                for data in response.iter_bytes():
                    yield from reading.feed(data)
            self._ended = True
            yield from reading.end()
        except TimedOut:
            raise  # it runs on
        except OctavoError:
            self._ended = True
            raise


class AsyncHttpTransport:
    def __init__(
        self, address: Address, headers: Mapping[str, str], tls: TLS | None, connect_timeout_s: float
    ) -> None:
        self._http = HttpMessages(address, headers, tls, connect_timeout_s)
        self._client = httpx.AsyncClient(**self._http.settings)

    async def asend(self, request: WireRequest, deadline: Deadline) -> "_AsyncExchange":
        return _AsyncExchange(self, request, deadline)

    async def aask(self, question: Question, model: str, version: str) -> Mapping[str, Any]:
        with typed_errors():
            response = await self._client.request(*self._http.asking(question, model, version))
        return self._http.answer(question, response)

    async def ametrics(self) -> str:
        return await asyncio.to_thread(self._http.get_metrics)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def open(self, request: WireRequest, deadline: Deadline) -> httpx.Response:
        """Its body is not read yet."""
        with typed_errors():
            built = self._client.build_request(**self._http.post(request, deadline.left_s))
            return await self._client.send(built, stream=True)

    async def cancel(self, request: WireRequest) -> None:
        """Best effort."""
        asking = self._http.post(request.cancelling(), CANCEL_TIMEOUT_S)
        for _ in range(_CANCEL_TRIES):
            with suppress(httpx.HTTPError):
                if is_settled(await self._client.request(**asking)):
                    return
            await asyncio.sleep(CANCEL_PAUSE_S)


class _AsyncExchange:
    waiting = False  # what httpx has read of a stream it gives out at once

    def __init__(self, transport: AsyncHttpTransport, request: WireRequest, deadline: Deadline) -> None:
        self._transport = transport
        self._request = request
        self._deadline = deadline
        self._response: httpx.Response | None = None
        self._ended = False
        self._replies = self._read()

    async def __anext__(self) -> Reply:
        return await anext(self._replies)

    async def aleave(self) -> None:
        if not self._ended:
            self._ended = True
            await self._transport.cancel(self._request)
        await self._replies.aclose()
        if self._response is not None:
            await self._response.aclose()

    async def _read(self) -> AsyncGenerator[Reply]:
        try:
            self._response = response = await self._transport.open(self._request, self._deadline)
            reading = Reading(response.status_code, self._request.streams, self._deadline)
            with typed_errors():
                async for data in response.aiter_bytes():
                    for reply in reading.feed(data):
                        yield reply
            self._ended = True
            for reply in reading.end():
                yield reply
        except TimedOut:
            raise  # it runs on
        except OctavoError:
            self._ended = True
            raise
