"""From an open request to the engine: parse, render, tokenise, submit; off Triton's thread and the engine's.

Lanes of one thread each: long prompts wait for long prompts only, since seconds of tokenising must not stall
everyone else, and those whose beginning a disk has for a disk. Used by `tritonserver`; whatever goes wrong
with a request ends up in the outbox as its error.
"""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from octavo.engine.loop import EngineLoop
from octavo.errors import Cancelled, DeadlineExceeded, NotFound, OctavoError, Unavailable
from octavo.request import Request, SamplingParams, TextDelta
from octavo.serving import codec
from octavo.serving.chat_request import Chat
from octavo.serving.outbox import OpenRequest, Outbox
from octavo.serving.reply import Reply
from octavo.serving.request_log import log_surprise
from octavo.serving.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

LONG_PROMPT_BYTES = 64 << 10  # some 20 ms of tokenising

_Lane = queue.SimpleQueue[tuple[OpenRequest, Callable[[], None]] | None]  # what to do for it


class Intake:
    """`start` once, then `put` from any thread; `close` refuses what comes later or still waits."""

    def __init__(
        self,
        engine: "Engine",
        loop: EngineLoop,
        outbox: Outbox,
        on_accept: Callable[[OpenRequest, Request, str | None], None] = lambda *_: None,
    ) -> None:
        """`on_accept` is told of every request that goes to the engine, and of its prompt's text if it has
        one; it must neither block nor raise."""
        self._room = WaitingRoom(engine.config.max_queue_size)
        self._engine = engine
        self._loop = loop
        self._outbox = outbox
        self._on_accept = on_accept
        self._short: _Lane = queue.SimpleQueue()
        self._long: _Lane = queue.SimpleQueue()
        self._stored: _Lane = queue.SimpleQueue()
        self._lanes = {"short": self._short, "long": self._long, "stored": self._stored}
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"octavo-intake-{name}", daemon=True)
            for name, lane in self._lanes.items()
        ]
        self._lock = threading.Lock()  # orders `put` against `close`
        self._closed = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, request: OpenRequest, num_bytes: int, time_limit_s: float | None = None) -> None:
        """Queues a request of so many bytes, which ends with `DeadlineExceeded` if it is not done so long
        after its arrival. Never blocks. Raises `Unavailable`: shutting down, or too many wait already."""
        lane = self._long if num_bytes > LONG_PROMPT_BYTES else self._short
        with self._lock:
            if self._closed:
                raise _shutting_down()
            if "cancel_request_id" not in request.tensors:  # which makes the line shorter, if anything
                self._room.enter(request.id)
            lane.put((request, partial(self._prepare, request)))
        if time_limit_s is not None:
            # By id: a request that is long done is not kept in memory until then.
            self._loop.at(request.arrived_s + time_limit_s, partial(self._expire, request.id, time_limit_s))

    def cancel(self, request: OpenRequest) -> None:
        """Ends a request with `Cancelled`, wherever it is; nothing happens when it is done already."""
        self._end(request, Cancelled("the request was cancelled"))

    def close(self) -> None:
        """Refuses what waits and what comes."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for lane in self._lanes.values():
                    lane.put(None)

    def join(self, timeout_s: float) -> None:
        """After `close`. A prompt that is being tokenised is not waited for beyond the time given."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self, lane: _Lane) -> None:
        while (item := lane.get()) is not None:
            request, go_on = item
            if request.withdrawn:
                continue
            try:
                if self._closed:
                    raise _shutting_down()
                go_on()
            except OctavoError as error:
                self._fail(request, error)
            except Exception as error:
                log_surprise(f"request {request} could not be prepared", error)
                self._fail(request, OctavoError(f"the request could not be prepared: {error!r}"))

    def _prepare(self, request: OpenRequest) -> None:
        tensors, request.tensors = request.tensors, {}
        parameters, request.parameters = request.parameters, ""
        call = codec.parse(tensors, parameters)
        if isinstance(call, codec.Cancel):
            self._cancel_named(call.request_id, request)
            return
        if call.traceparent:
            request.trace_context = {"traceparent": call.traceparent, "tracestate": call.tracestate or ""}
        make_request = partial(
            self._engine.make_request,
            request.id,
            priority=call.priority,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
            arrived_s=request.arrived_s,
        )
        if isinstance(call, codec.Embed):
            request.operation = "embeddings"
            ready = make_request(call.prompt, embed=call.pooling)
            text = call.prompt if isinstance(call.prompt, str) else None
            self._submit(request, ready, Reply(ready.params, call.returns, stream=False), text)
            return
        prompt = call.prompt
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Chat):
            request.operation = "chat"
            text = prompt.render(self._engine.tokenizer)
            prompt = tuple(self._engine.encode(text, add_special_tokens=False))
        ready = make_request(prompt, call.params, cumulative_logprob=call.returns.cumulative_logprob)
        echo = text if call.echo else None
        if call.echo and text is None:
            echo = self._engine.tokenizer.decode(ready.prompt_token_ids, call.params.skip_special_tokens)
        self._submit(request, ready, Reply(call.params, call.returns, call.stream, echo), text)

    def _submit(self, request: OpenRequest, ready: Request, reply: Reply, text: str | None) -> None:
        request.reply = reply
        sink, on_start = partial(self._deliver, request), partial(self._room.leave, request.id)

        def submit() -> None:
            self._on_accept(request, ready, text)  # first, since the engine may be quick
            self._loop.submit(ready, sink, on_start)

        def read_and_submit() -> None:
            self._engine.read_stored(ready)
            request.hand_over(submit)

        if not self._engine.expects_stored(ready):
            request.hand_over(submit)
            return
        with self._lock:
            if self._closed:
                raise _shutting_down()
            self._stored.put((request, read_and_submit))

    def _deliver(self, request: OpenRequest, delta: TextDelta) -> None:
        if delta.request_finished:  # perhaps without ever having started
            self._room.leave(request.id)
        self._outbox.put(request, delta)

    def _fail(self, request: OpenRequest, error: OctavoError) -> None:
        """Ends a request that the engine does not know."""
        self._room.leave(request.id)
        self._outbox.fail(request, error)

    def _end(self, request: OpenRequest, error: OctavoError) -> None:
        """Ends a request wherever it is."""
        if request.withdraw():
            self._fail(request, error)
        else:
            self._loop.abort(request.id, error)

    def _expire(self, request_id: str, time_limit_s: float) -> None:
        """On the engine's thread, at the request's deadline."""
        request = self._outbox.find(request_id)
        if request is not None:
            self._end(
                request,
                DeadlineExceeded(
                    f"the request was not done {time_limit_s * 1000:.0f} ms after its arrival, which is its "
                    "deadline; give it more time (octavo_deadline_ms, or timeout in microseconds), or ask "
                    "for fewer tokens"
                ),
            )

    def _cancel_named(self, client_id: str, asking: OpenRequest) -> None:
        named = [request for request in self._outbox.named(client_id) if request is not asking]
        if not named:
            raise NotFound(
                f"no open request has the id {client_id[:80]!r}: it is done, it has not arrived yet, "
                "or another instance of the model has it"
            )
        for request in named:
            self.cancel(request)
        asking.reply = Reply(SamplingParams(), codec.Returns(), stream=False)
        self._outbox.put(asking, TextDelta(asking.id, request_finished=True))


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down; send the request to another one")
