"""The client for asyncio, twin of the one in `_client`: the same names, the same results."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn, Self, Unpack

from octavo_client import _metrics
from octavo_client._base import (
    Address,
    Attempts,
    BaseClient,
    Deadline,
    Messages,
    Question,
    Value,
    WireRequest,
    chat_inputs,
    model_info,
    model_states,
)
from octavo_client._errors import NotFound, OctavoError, ProtocolError, Unavailable
from octavo_client._many import Collector, ManyResults, OnProgress, check_options, inputs_of, params_of_each
from octavo_client._replies import Answer, Reply
from octavo_client._transports import AsyncExchange, AsyncTransport, connect_async
from octavo_client._types import (
    TLS,
    ChatOptions,
    Completion,
    Delta,
    Embedding,
    Health,
    ModelInfo,
    ModelState,
    Options,
    Prompt,
    Retries,
    SamplingParams,
)


class AsyncClient(BaseClient):
    """Asks one model of one Triton server, from one event loop. Close it, or use it in an `async with`.

    Its arguments, and what its methods do, are those of `Client`. `stream` and `stream_chat` return at once
    and are not awaited; what they return is.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        model: str = "llm",
        model_version: str = "",
        timeout_s: float | None = None,
        connect_timeout_s: float = 5.0,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
        tls: TLS | None = None,
        metrics_url: str | None = None,
        transport: AsyncTransport | None = None,
    ) -> None:
        super().__init__(model=model, model_version=model_version, timeout_s=timeout_s, retries=retries)
        self._transport = transport or connect_async(
            Address.parse(url, metrics_url), headers or {}, tls, connect_timeout_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave streams first: a connection that is closed under them cannot end them properly."""
        await self._transport.aclose()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole continuation of a prompt, without the prompt. Raises `OctavoError`."""
        return await self._complete(prompt, params, options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> "AsyncStream":
        """The continuation as it comes."""
        return self._stream(self._generation(prompt, params, True, options), options)

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The next message, as the model's own chat template has it. Raises `OctavoError`."""
        inputs, others = chat_inputs(messages, options)
        return await self._complete(inputs, params, others)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> "AsyncStream":
        inputs, others = chat_inputs(messages, options)
        return self._stream(self._generation(inputs, params, True, others), others)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Literal["last", "mean"] | None = None,
        dimensions: int | None = None,
        **options: Unpack[Options],
    ) -> Embedding:
        """A prompt's vector, of its first `dimensions` only if that is set. Raises `OctavoError`."""
        request = self._embedding(prompt, pooling, dimensions, options)
        async with self._stream(request, options) as stream:
            return (await stream.read()).embedding()

    async def generate_many(
        self,
        prompts: Iterable[Prompt | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        concurrency: int = 16,
        progress: OnProgress | bool | None = None,
        **options: Unpack[Options],
    ) -> ManyResults:
        """Answers many prompts and chats, `concurrency` at a time. One that fails does not end the others.

        Messages are a chat, as in `chat`; a text or ids are a prompt, as in `generate`. `params` are for all,
        or one for each. `progress` is told of each that ends; True shows a bar. When it raises, or this is
        cancelled, the requests that run are cancelled.
        """
        check_options(options, concurrency)
        all_prompts = list(prompts)
        each = params_of_each(params, len(all_prompts))
        requests = [
            self._generation(inputs_of(prompt), own, False, options)
            for prompt, own in zip(all_prompts, each, strict=True)
        ]
        collector = Collector(len(requests), progress)
        seats = asyncio.Semaphore(concurrency)

        async def run(index: int, request: WireRequest) -> None:
            async with seats:
                collector.put(index, await self._try(request, options))

        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(run(index, request))
        return collector.results()

    async def cancel(self, request_id: str) -> bool:
        """Ends the requests with that id, whoever sent them. False: the instance that was asked has none, be
        it that they are done, have not arrived, or are at another instance. Raises `OctavoError`."""
        async with self._stream(self._cancellation(request_id), {}) as stream:
            try:
                await stream.read()
            except NotFound:
                return False
        return True

    async def health(self) -> Health:
        """Raises nothing where no server is: that is not live."""
        try:
            live = await self._is(Question.LIVE)
            ready = await self._is(Question.READY)
            return Health(live, ready, await self._is(Question.MODEL_READY))
        except OctavoError as error:
            return Health(not isinstance(error, Unavailable), False, False)

    async def metrics(self) -> _metrics.Metrics:
        """Of the whole server. Raises `OctavoError`."""
        return _metrics.parse(await self._transport.ametrics())

    async def model_info(self) -> ModelInfo:
        """Raises `OctavoError`, `NotFound` if there is no such model."""
        metadata = await self._transport.aask(Question.METADATA, self.model, self.model_version)
        config = await self._transport.aask(Question.CONFIG, self.model, self.model_version)
        return model_info(metadata, config)

    async def models(self) -> tuple[ModelState, ...]:
        """All models of the server's repository, ready or not. Raises `OctavoError`."""
        return model_states(await self._transport.aask(Question.MODELS, self.model, ""))

    async def load_adapter(self, name: str, path: str) -> NoReturn:
        """Raises `NoAdapters`: no server has a way to do that yet."""
        del path
        self._refuse_adapter(name)

    async def unload_adapter(self, name: str) -> NoReturn:
        """Raises `NoAdapters`: no server has a way to do that yet."""
        self._refuse_adapter(name)

    async def _complete(
        self, prompt: Prompt | Mapping[str, Value], params: SamplingParams | None, options: Options
    ) -> Completion:
        async with self._stream(self._generation(prompt, params, False, options), options) as stream:
            return (await stream.read()).completion()

    def _stream(self, request: WireRequest, options: Options) -> "AsyncStream":
        return AsyncStream(self._transport, request, *self._limits(options))

    async def _is(self, question: Question) -> bool:
        answer = await self._transport.aask(question, self.model, self.model_version)
        return bool(answer["ready"])

    async def _try(self, request: WireRequest, options: Options) -> Completion | OctavoError:
        try:
            async with self._stream(request, options) as stream:
                return (await stream.read()).completion()
        except OctavoError as error:
            return error


class AsyncStream:
    """An asynchronous iterator of `Delta`, and a context manager: leaving it ends the request on the server.

    Nothing is sent before the first delta is asked for. Used by one task. Iterating raises `OctavoError`;
    what came before that is in `completion`.
    """

    def __init__(
        self, transport: AsyncTransport, request: WireRequest, deadline: Deadline, attempts: Attempts
    ) -> None:
        self._transport = transport
        self._request = request
        self._deadline = deadline
        self._attempts = attempts
        self._answer = Answer(request.request_id)
        self._deltas: deque[Delta] = deque()
        self._exchange: AsyncExchange | None = None
        self._ended = False
        self._failure: OctavoError | None = None  # to be raised when it is its turn

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def completion(self) -> Completion:
        """Of all that has come so far."""
        return self._answer.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            reply = await self._receive()
            if reply is None:
                raise StopAsyncIteration
            self._deltas.extend(self._answer.add(reply))
        return self._deltas.popleft()

    async def next_deltas(self) -> list[Delta]:
        """All that has come by now: waits for one delta, and takes those beside it. Empty after the last."""
        try:
            deltas = [await anext(self)]
        except StopAsyncIteration:
            return []
        while True:
            deltas += self._deltas
            self._deltas.clear()
            exchange = self._exchange
            if exchange is None or not exchange.waiting or self._answer.finished:
                return deltas
            try:
                reply = await self._receive()
            except OctavoError as error:
                self._failure = error  # first what came before it
                return deltas
            if reply is not None:
                self._deltas.extend(self._answer.add(reply))

    async def read(self) -> Answer:
        """The rest, up to the end."""
        async for _ in self:
            pass
        if not self._answer.num_replies:
            raise ProtocolError("the server ended the request without an answer", self.request_id)
        return self._answer

    async def close(self) -> None:
        """What leaving the `async with` does. Waits until the server has ended the request, at most 2 s."""
        self._ended = True
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._answer.finished:  # but for the end of the stream, which is on its way
            try:
                while True:
                    await anext(exchange)
            except (StopAsyncIteration, OctavoError):
                pass
        await exchange.aleave()

    async def _receive(self) -> Reply | None:
        """None after the last one."""
        while not self._ended:
            try:
                if self._exchange is None:
                    self._exchange = await self._transport.asend(self._request, self._deadline)
                return await anext(self._exchange)
            except StopAsyncIteration:
                await self.close()
            except OctavoError as error:
                pause_s = self._attempts.pause_s(error, answered=self._answer.num_replies > 0)
                await self.close()
                if pause_s is None:
                    error.request_id = self.request_id
                    raise
                self._ended = False
                await asyncio.sleep(pause_s)
        return None
