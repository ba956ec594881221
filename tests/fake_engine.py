"""An engine that counts instead of computing, for tests of what is around an engine."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.metrics import EngineStats, StepLog
from octavo.errors import Cancelled, DeadlineExceeded, InvalidArgument, OctavoError
from octavo.request import Request, RequestStats, SamplingParams, Sink, TextDelta

TIMEOUT_S = 5.0
STATS = RequestStats(0.5, 0.25, 1.5, 4, 2)  # of every request


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
    """Continues every sequence with a, b, c, ..., a token a step; `paused` keeps it from stepping.

    Prompts that have the token `on_disk` are read from a disk, as soon as `read` is set."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.arguments = {
            item.name: value
            for item in fields(config)
            if (value := getattr(config, item.name)) != item.default
        }
        self.tokenizer = FakeTokenizer()
        self.open: dict[str, tuple[Request, Sink, int]] = {}
        self._on_start: dict[str, Callable[[], None]] = {}
        self.seen: list[Request] = []
        self.finished: dict[str, int] = {}
        self.num_tokens = 0
        self.steps = StepLog()
        self.running = threading.Event()
        self.running.set()
        self.broken: Exception | None = None
        self.closed = False
        self.on_disk: int | None = None
        self.reading = threading.Event()
        self.read = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def make_request(
        self, id: str, prompt: str | Sequence[int], params: SamplingParams | None = None, **settings: Any
    ) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidArgument("the prompt is empty")
        return Request(id, tuple(ids), params or SamplingParams(), **settings)

    def expects_stored(self, request: Request) -> bool:
        return self.on_disk in request.prompt_token_ids

    def read_stored(self, request: Request) -> None:
        self.reading.set()
        assert self.read.wait(TIMEOUT_S)
        request.stored[b""] = "content"

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request: Request, sink: Sink, on_start: Callable[[], None] | None = None) -> None:
        self.seen.append(request)
        if on_start:
            self._on_start[request.id] = on_start
        self.open[request.id] = (request, sink, 0)

    def abort(self, request_id: str, error: OctavoError | None = None) -> bool:
        entry = self.open.pop(request_id, None)
        if entry:
            gave_up = error is None or isinstance(error, (Cancelled, DeadlineExceeded))
            self._count("abort" if gave_up else "error")
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
        if self.open:
            self.steps.begin(len(self.open), len(self.open))
            for request, sink, position in list(self.open.values()):
                self._advance(request, sink, position)
            self.steps.end()
            self.steps.note_parts(0.25, 0.125)
        time.sleep(0.001)
        return True

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.open),
            num_waiting=0,
            num_blocks=10,
            num_used_blocks=len(self.open),
            num_cached_blocks=0,
            num_reusable_blocks=0,
            num_shared_blocks=0,
            block_size=16,
            prompt_tokens_total=7,
            cached_prompt_tokens_total=0,
            generation_tokens_total=self.num_tokens,
            preemptions_total=3,
            prefix_queries_total=20,
            prefix_hits_total=5,
            block_copies_total=0,
            steps_total=self.steps.num_steps,
            step_s_total=self.steps.duration_s,
            forward_s_total=self.steps.forward_s,
            sample_s_total=self.steps.sample_s,
            requests_finished=self.finished,
        )

    def close(self) -> None:
        self.closed = True

    def _advance(self, request: Request, sink: Sink, position: int) -> None:
        if start := self._on_start.pop(request.id, None):
            start()
        if request.embed:
            del self.open[request.id]
            sink(TextDelta(request.id, embedding=(0.6, -0.8), stats=STATS, request_finished=True))
            return
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
                    stats=STATS if last and index + 1 == request.params.n else None,
                    request_finished=last and index + 1 == request.params.n,
                )
            )

    def _count(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
