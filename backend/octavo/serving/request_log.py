"""The request log: a line of JSON when a request is accepted, and one when it has ended.

Lines are made by whoever has the news (a tokenizer thread, the sender) and written by the reporting thread,
to the standard error of the model's process, which is the server's: Triton's own logger would quote them.

What a client wrote is in no line: neither its prompt, nor the value of a parameter, nor an error's text that
may quote one. With `enable_log_requests` in model.json all of it is, as vLLM logs it.
"""

import json
import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import Any

from octavo.errors import Cancelled, OctavoError, StepFailed, Unavailable
from octavo.request import Request, SamplingParams
from octavo.serving.ended_request import EndedRequest
from octavo.serving.outbox import OpenRequest

log = logging.getLogger("octavo")

# Their texts are all our own, about the server. Those of others say what is wrong with what a client wrote.
_ABOUT_THE_SERVER = (Unavailable, StepFailed, Cancelled)
_DEFAULTS = SamplingParams()


def _to_standard_error(line: bytes) -> None:
    """At once and whole, so that no other line gets between."""
    os.write(2, line)


@dataclass(frozen=True, slots=True)
class RequestLog:
    """`of` says whose requests these are, in every line. `max_log_len` is how much of a prompt is logged, in
    characters or token ids; None is all. `defer` has something run soon, on a thread that may wait."""

    of: Mapping[str, str]
    defer: Callable[[Callable[[], object]], object]
    with_prompts: bool = False
    max_log_len: int | None = None
    write: Callable[[bytes], object] = _to_standard_error

    def accepted(self, request: OpenRequest, ready: Request, text: str | None) -> None:
        """Just before the engine gets it. `text` is the prompt's; None for one that came as token ids."""
        facts: dict[str, Any] = {
            "operation": request.operation,
            "prompt_tokens": len(ready.prompt_token_ids),
            "priority": ready.priority,
            "tenant": ready.tenant if self.with_prompts else None,
        }
        if not ready.embed:
            facts |= {"n": ready.params.n, "max_tokens": ready.params.max_tokens}
        if self.with_prompts:
            shown = slice(self.max_log_len)
            facts |= {
                "prompt": None if text is None else text[shown],
                "prompt_token_ids": ready.prompt_token_ids[shown] if text is None else None,
                "sampling_parameters": _changed(ready.params),
            }
        self._put("accepted", request, facts)

    def ended(self, ended: EndedRequest) -> None:
        """After its final response."""
        if ended.is_control:
            return
        error, stats = ended.error, ended.stats
        facts: dict[str, Any] = {
            "prompt_tokens": ended.num_prompt_tokens,
            "output_tokens": ended.request.num_tokens,
            "latency_s": ended.latency_s,
            "time_to_first_token_s": ended.time_to_first_token_s,
        }
        if error is not None:
            facts |= {"code": error.code, "error": type(error).__name__, "message": self._message(error)}
            self._put("cancelled" if isinstance(error, Cancelled) else "failed", ended.request, facts)
            return
        facts["finish_reasons"] = ended.finish_reasons
        if stats is not None:
            facts |= {name: getattr(stats, name) for name in ("queue_s", "prefill_s", "decode_s")}
            facts |= {"cached_prompt_tokens": stats.cached_prompt_tokens, "preemptions": stats.preemptions}
        self._put("finished", ended.request, facts)

    def _message(self, error: OctavoError) -> str | None:
        return str(error) if self.with_prompts or isinstance(error, _ABOUT_THE_SERVER) else None

    def _put(self, event: str, request: OpenRequest, facts: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        ids = {"request_id": request.client_id or request.id, "octavo_id": request.id}
        line: dict[str, Any] = {"time": now, "event": event, **ids, **self.of}
        line |= {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in facts.items()
            if value is not None
        }
        self.defer(partial(self.write, json.dumps(line).encode() + b"\n"))


def log_surprise(what: str, error: Exception) -> None:
    """Logs where an unforeseen exception came from, without its own words: they may quote a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\nTraceback (most recent call last):\n%s", what, type(error).__name__, where.rstrip())


def _changed(params: SamplingParams) -> dict[str, Any]:
    return {
        item.name: getattr(params, item.name)
        for item in fields(params)
        if getattr(params, item.name) != getattr(_DEFAULTS, item.name)
    }
