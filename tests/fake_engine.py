"""An engine that counts instead of computing, for tests of what is around an engine."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.metrics import EngineStats
from octavo.errors import Cancelled, InvalidArgument, OctavoError
from octavo.request import Request, SamplingParams, Sink, TextDelta

TIMEOUT_S = 5.0


class FakeTokenizer:
    """A token is a character. `hold` makes every prompt that contains it wait for `released`."""

    def __init__(self) -> None:
        self.hold: str | None = None
        self.holding = threading.Event()
        self.released = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.hold is not None and self.hold in text:
            self.holding.set()
            assert self.released.wait(TIMEOUT_S)
        return [*([0] if add_special_tokens else []), *map(ord, text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if messages[0]["role"] == "nobody":
            raise ZeroDivisionError("a bug in the template")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


class FakeEngine:
    """Continues every sequence with a, b, c, ..., a token a step; `paused` keeps it from stepping."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.tokenizer = FakeTokenizer()
        self.open: dict[str, tuple[Request, Sink, int]] = {}
        self.seen: list[Request] = []
        self.finished: dict[str, int] = {}
        self.num_tokens = 0
        self.running = threading.Event()
        self.running.set()
        self.broken: Exception | None = None
        self.closed = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def make_request(
        self, id: str, prompt: str | Sequence[int], params: SamplingParams, **settings: Any
    ) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidArgument("the prompt is empty")
        return Request(id, tuple(ids), params, **settings)

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request: Request, sink: Sink) -> None:
        self.seen.append(request)
        self.open[request.id] = (request, sink, 0)

    def abort(self, request_id: str, error: OctavoError | None = None) -> bool:
        entry = self.open.pop(request_id, None)
        if entry:
            self._count("error" if error else "abort")
            entry[1](TextDelta(request_id, error=error or Cancelled("cancelled"), request_finished=True))
        return entry is not None

    def abort_all(self, error: OctavoError) -> None:
        for request_id in list(self.open):
            self.abort(request_id, error)

    answer_all = abort_all

    def step(self) -> bool:
        if not self.running.wait(0.01):
            return False
        if self.broken:
            raise self.broken
        for request, sink, position in list(self.open.values()):
            self._advance(request, sink, position)
        time.sleep(0.001)
        return True

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self.open), 0, 10, len(self.open), 0, 7, 0, self.num_tokens, 3, 20, 5, self.finished
        )

    def close(self) -> None:
        self.closed = True

    def _advance(self, request: Request, sink: Sink, position: int) -> None:
        token = ord("a") + position % 26
        last = position + 1 == request.params.max_tokens
        self.open[request.id] = (request, sink, position + 1)
        if last:
            del self.open[request.id]
            self._count("length")
        for index in range(request.params.n):
            self.num_tokens += 1
            sink(
                TextDelta(
                    request.id,
                    index,
                    chr(token),
                    (token,),
                    finish_reason="length" if last else None,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    request_finished=last and index + 1 == request.params.n,
                )
            )

    def _count(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
