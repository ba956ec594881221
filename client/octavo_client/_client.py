"""The client, and its twin for asyncio in `_async_client`: the same names, the same results."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
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
from octavo_client._transports import Exchange, Transport, connect
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


class Client(BaseClient):
    """Asks one model of one Triton server. Shared by threads; close it, or use it in a `with`.

    `url` is `http://HOST:PORT`, `https://`, `grpc://` or `grpcs://`: over gRPC a request that waits in the
    queue costs no connection of its own. `timeout_s` is for each request, None for no limit, and is seen over
    HTTP only when something comes, or nothing for that long. Metrics are at port 8002 of the same host unless
    `metrics_url` says otherwise. With a `transport` none of that counts.
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
        transport: Transport | None = None,
    ) -> None:
        super().__init__(model=model, model_version=model_version, timeout_s=timeout_s, retries=retries)
        self._transport = transport or connect(
            Address.parse(url, metrics_url), headers or {}, tls, connect_timeout_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave streams first: a connection that is closed under them cannot end them properly."""
        self._transport.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole continuation of a prompt, without the prompt. Raises `OctavoError`."""
        return self._complete(prompt, params, options)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> "Stream":
        """The continuation as it comes."""
        return self._stream(self._generation(prompt, params, True, options), options)

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """The next message, as the model's own chat template has it. Raises `OctavoError`."""
        inputs, others = chat_inputs(messages, options)
        return self._complete(inputs, params, others)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> "Stream":
        inputs, others = chat_inputs(messages, options)
        return self._stream(self._generation(inputs, params, True, others), others)

    def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Literal["last", "mean"] | None = None,
        dimensions: int | None = None,
        **options: Unpack[Options],
    ) -> Embedding:
        """A prompt's vector, of its first `dimensions` only if that is set. Raises `OctavoError`."""
        request = self._embedding(prompt, pooling, dimensions, options)
        with self._stream(request, options) as stream:
            return stream.read().embedding()

    def generate_many(
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
        or one for each. `progress` is told of each that ends; True shows a bar. When it raises, or on Ctrl-C,
        the requests that run are cancelled.
        """
        check_options(options, concurrency)
        all_prompts = list(prompts)
        each = params_of_each(params, len(all_prompts))
        requests = [
            self._generation(inputs_of(prompt), own, False, options)
            for prompt, own in zip(all_prompts, each, strict=True)
        ]
        collector = Collector(len(requests), progress)
        running: dict[Future[Completion | OctavoError], int] = {}
        waiting = deque(enumerate(requests))
        with ThreadPoolExecutor(concurrency, "octavo-client") as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < concurrency:
                        index, request = waiting.popleft()
                        running[pool.submit(self._try, request, options)] = index
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        collector.put(running.pop(future), future.result())
            except BaseException:
                for index in running.values():
                    self._cancel_quietly(requests[index].request_id)
                raise
        return collector.results()

    def cancel(self, request_id: str) -> bool:
        """Ends the requests with that id, whoever sent them. False: the instance that was asked has none, be
        it that they are done, have not arrived, or are at another instance. Raises `OctavoError`."""
        with self._stream(self._cancellation(request_id), {}) as stream:
            try:
                stream.read()
            except NotFound:
                return False
        return True

    def health(self) -> Health:
        """Raises nothing where no server is: that is not live."""
        try:
            live = self._is(Question.LIVE)
            ready = self._is(Question.READY)
            return Health(live, ready, self._is(Question.MODEL_READY))
        except OctavoError as error:
            return Health(not isinstance(error, Unavailable), False, False)

    def metrics(self) -> _metrics.Metrics:
        """Of the whole server. Raises `OctavoError`."""
        return _metrics.parse(self._transport.metrics())

    def model_info(self) -> ModelInfo:
        """Raises `OctavoError`, `NotFound` if there is no such model."""
        metadata = self._transport.ask(Question.METADATA, self.model, self.model_version)
        config = self._transport.ask(Question.CONFIG, self.model, self.model_version)
        return model_info(metadata, config)

    def models(self) -> tuple[ModelState, ...]:
        """All models of the server's repository, ready or not. Raises `OctavoError`."""
        return model_states(self._transport.ask(Question.MODELS, self.model, ""))

    def load_adapter(self, name: str, path: str) -> NoReturn:
        """Raises `NoAdapters`: no server has a way to do that yet."""
        del path
        self._refuse_adapter(name)

    def unload_adapter(self, name: str) -> NoReturn:
        """Raises `NoAdapters`: no server has a way to do that yet."""
        self._refuse_adapter(name)

    def _complete(
        self, prompt: Prompt | Mapping[str, Value], params: SamplingParams | None, options: Options
    ) -> Completion:
        with self._stream(self._generation(prompt, params, False, options), options) as stream:
            return stream.read().completion()

    def _stream(self, request: WireRequest, options: Options) -> "Stream":
        return Stream(self._transport, request, *self._limits(options))

    def _is(self, question: Question) -> bool:
        answer = self._transport.ask(question, self.model, self.model_version)
        return bool(answer["ready"])

    def _try(self, request: WireRequest, options: Options) -> Completion | OctavoError:
        try:
            with self._stream(request, options) as stream:
                return stream.read().completion()
        except OctavoError as error:
            return error

    def _cancel_quietly(self, request_id: str) -> None:
        with suppress(OctavoError):  # it is done, or nobody is there
            self.cancel(request_id)


class Stream:
    """An iterator of `Delta`, and a context manager: leaving it ends the request on the server.

    Nothing is sent before the first delta is asked for. Used by one thread. Iterating raises `OctavoError`;
    what came before that is in `completion`.
    """

    def __init__(
        self, transport: Transport, request: WireRequest, deadline: Deadline, attempts: Attempts
    ) -> None:
        self._transport = transport
        self._request = request
        self._deadline = deadline
        self._attempts = attempts
        self._answer = Answer(request.request_id)
        self._deltas: deque[Delta] = deque()
        self._exchange: Exchange | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def completion(self) -> Completion:
        """Of all that has come so far."""
        return self._answer.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            reply = self._receive()
            if reply is None:
                raise StopIteration
            self._deltas.extend(self._answer.add(reply))
        return self._deltas.popleft()

    def next_deltas(self) -> list[Delta]:
        """All that has come by now: waits for one delta, and takes those beside it. Empty after the last."""
        first = next(self, None)
        deltas = [] if first is None else [first, *self._deltas]
        self._deltas.clear()
        return deltas

    def read(self) -> Answer:
        """The rest, up to the end."""
        for _ in self:
            pass
        if not self._answer.num_replies:
            raise ProtocolError("the server ended the request without an answer", self.request_id)
        return self._answer

    def close(self) -> None:
        """What leaving the `with` does. Blocks until the server has ended the request, at most 2 s."""
        self._ended = True
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._answer.finished:  # but for the end of the stream, which is on its way
            try:
                while True:
                    next(exchange)
            except (StopIteration, OctavoError):
                pass
        exchange.leave()

    def _receive(self) -> Reply | None:
        """None after the last one."""
        while not self._ended:
            try:
                if self._exchange is None:
                    self._exchange = self._transport.send(self._request, self._deadline)
                return next(self._exchange)
            except StopIteration:
                self.close()
            except OctavoError as error:
                pause_s = self._attempts.pause_s(error, answered=self._answer.num_replies > 0)
                self.close()
                if pause_s is None:
                    error.request_id = self.request_id
                    raise
                self._ended = False
                time.sleep(pause_s)
        return None
