"""How an answer reaches whoever asked: as one JSON object, or as server-sent events while it is made.

Both end the work when the client goes away, whatever state it is in. Used by the routes in `app`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_client import AsyncStream, Delta, OctavoError, Usage
from octavo_client import Completion as WholeAnswer
from octavo_gateway.errors import ApiError, ClientGone

log = logging.getLogger("octavo.gateway")

DONE = b"data: [DONE]\n\n"
_BACKLOG = 64  # lists of deltas that wait while a client with several prompts reads slowly
Result = TypeVar("Result")
ToError = Callable[[OctavoError], ApiError]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns. Raises `ClientGone` when the client goes first: the work is cancelled then, and
    has ended. `receive` is ASGI's, after the body."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JSONAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


class EventStream(Response):
    """Sends events as they come. What fails before the first is an answer of its own status; after that it is
    an event, and no `[DONE]` follows."""

    def __init__(
        self, events: AsyncGenerator[bytes], to_error: ToError, headers: dict[str, str] | None = None
    ) -> None:
        self._events = events
        self._to_error = to_error
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})},
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await unless_gone(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            failure = self._failure(error)
            if not started:
                await failure.response()(scope, receive, send)
                return
            event = f"data: {json.dumps(failure.body)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, OctavoError):
            return self._to_error(error)
        if isinstance(error, ApiError):
            return error
        log.error("a stream failed by a mistake of the gateway's", exc_info=error)
        return ApiError(500, "the gateway failed at it; its log says more")


class Chunks:
    """Writes the events of one answer from prepared bytes: this runs once a token, so no object is built."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, *, with_usage: bool) -> None:
        head = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + json.dumps({**head, "system_fingerprint": None})[:-1].encode()
        self._begin = self._head + b',"choices":[{"index":'
        # With `include_usage` each chunk has a usage, null in all but the last.
        self._end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"

    def choice(self, index: int, content: str, logprobs: Any, finish_reason: str | None) -> bytes:
        """`content`: the JSON of what the choice holds, such as `"text":"..."`."""
        rest = f"{index},{content}"
        rest += ',"logprobs":null' if logprobs is None else f',"logprobs":{json.dumps(logprobs)}'
        rest += ',"finish_reason":null' if finish_reason is None else f',"finish_reason":"{finish_reason}"'
        return self._begin + rest.encode() + self._end

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + f',"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode()


async def news_of(
    streams: Sequence[AsyncStream], num_sequences: int
) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """What comes of each stream, by its place, until all of their sequences have finished. Leaves them."""
    if len(streams) > 1:
        async with aclosing(_of_several(streams, num_sequences)) as several:
            async for news in several:
                yield news
        return
    (stream,) = streams
    async with stream:
        going = num_sequences
        while going and (deltas := await stream.next_deltas()):
            going -= sum(delta.finish_reason is not None for delta in deltas)
            yield 0, deltas


async def _of_several(
    streams: Sequence[AsyncStream], num_sequences: int
) -> AsyncGenerator[tuple[int, list[Delta]]]:
    waiting: asyncio.Queue[tuple[int, list[Delta]] | BaseException | None] = asyncio.Queue(_BACKLOG)

    async def read(place: int, stream: AsyncStream) -> None:
        try:
            async with aclosing(news_of([stream], num_sequences)) as all_news:
                async for _, deltas in all_news:
                    await waiting.put((place, deltas))
            await waiting.put(None)
        except Exception as error:
            await waiting.put(error)

    readers = [asyncio.ensure_future(read(place, stream)) for place, stream in enumerate(streams)]
    try:
        going = len(streams)
        while going:
            news = await waiting.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                going -= 1
            else:
                yield news
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def all_of(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs all at once. The first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    completion = sum(answer.usage.completion_tokens for answer in answers)
    cached = sum(answer.stats.cached_prompt_tokens for answer in answers if answer.stats)
    usage = Usage(prompt, completion)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
