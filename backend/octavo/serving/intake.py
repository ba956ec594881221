"""From an open request to the engine: parse, render, tokenise, submit; off Triton's thread and the engine's.

Two lanes of one thread each: long prompts wait for long prompts only, since seconds of tokenising must not
stall everyone else. Used by `tritonserver`; whatever goes wrong with a request ends up in the outbox as its
error.
"""

import logging
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from octavo.engine.loop import EngineLoop
from octavo.errors import Cancelled, NotFound, OctavoError, Unavailable
from octavo.request import SamplingParams, TextDelta
from octavo.serving import codec
from octavo.serving.outbox import OpenRequest, Outbox
from octavo.serving.reply import Reply

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

log = logging.getLogger("octavo")

LONG_PROMPT_BYTES = 64 << 10  # some 20 ms of tokenising

_Lane = queue.SimpleQueue[OpenRequest | None]


class Intake:
    """`start` once, then `put` from any thread; `close` refuses what comes later or still waits."""

    def __init__(self, engine: "Engine", loop: EngineLoop, outbox: Outbox) -> None:
        self._engine = engine
        self._loop = loop
        self._outbox = outbox
        self._short: _Lane = queue.SimpleQueue()
        self._long: _Lane = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"octavo-intake-{name}", daemon=True)
            for name, lane in (("short", self._short), ("long", self._long))
        ]
        self._lock = threading.Lock()  # orders `put` against `close`
        self._closed = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, request: OpenRequest, num_bytes: int) -> None:
        """Queues a request of so many bytes. Never blocks."""
        lane = self._long if num_bytes > LONG_PROMPT_BYTES else self._short
        with self._lock:
            if not self._closed:
                lane.put(request)
                return
        self._outbox.fail(request, _shutting_down())

    def cancel(self, request: OpenRequest) -> None:
        """Ends a request with `Cancelled`, wherever it is; nothing happens when it is done already."""
        if request.withdraw():
            self._outbox.fail(request, Cancelled("the request was cancelled"))
        else:
            self._loop.abort(request.id)

    def close(self) -> None:
        """Refuses what waits and what comes."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._short.put(None)
                self._long.put(None)

    def join(self, timeout_s: float) -> None:
        """After `close`. A prompt that is being tokenised is not waited for beyond the time given."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self, lane: _Lane) -> None:
        while (request := lane.get()) is not None:
            if request.withdrawn:
                continue
            try:
                if self._closed:
                    raise _shutting_down()
                self._prepare(request)
            except OctavoError as error:
                self._outbox.fail(request, error)
            except Exception as error:
                log.exception("request %s could not be prepared", request)
                self._outbox.fail(request, OctavoError(f"the request could not be prepared: {error!r}"))

    def _prepare(self, request: OpenRequest) -> None:
        tensors, request.tensors = request.tensors, {}
        parameters, request.parameters = request.parameters, ""
        call = codec.parse(tensors, parameters)
        if isinstance(call, codec.Cancel):
            self._cancel_named(call.request_id, request)
            return
        prompt = call.prompt
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, codec.Chat):
            text = self._engine.tokenizer.render_chat(prompt.messages)
            prompt = tuple(self._engine.encode(text, add_special_tokens=False))
        ready = self._engine.make_request(
            request.id,
            prompt,
            call.params,
            priority=call.priority,
            cumulative_logprob=call.returns.cumulative_logprob,
            cache_salt=call.cache_salt,
        )
        if call.echo and text is None:
            text = self._engine.tokenizer.decode(ready.prompt_token_ids, call.params.skip_special_tokens)
        request.reply = Reply(call.params, call.returns, call.stream, text if call.echo else None)
        request.hand_over(lambda: self._loop.submit(ready, partial(self._outbox.put, request)))

    def _cancel_named(self, client_id: str, asking: OpenRequest) -> None:
        named = [request for request in self._outbox.named(client_id) if request is not asking]
        if not named:
            raise NotFound(
                f"no open request has the id '{client_id[:80]}': it is done, it has not arrived yet, "
                "or another instance of the model has it"
            )
        for request in named:
            self.cancel(request)
        asking.reply = Reply(SamplingParams(), codec.Returns(), stream=False)
        self._outbox.put(asking, TextDelta(asking.id, request_finished=True))


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down; send the request to another one")
