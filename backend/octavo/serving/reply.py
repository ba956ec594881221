"""From the text deltas of one request to the tensors of its responses.

The way back of `codec`, and as pure. A `Reply` belongs to the sender thread, which adds what is waiting
(several deltas become one response when it is behind) and takes the tensors of the next response.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.request import FinishReason, Logprob, RequestStats, SamplingParams, TextDelta
from octavo.serving.codec import Returns, Tensors

# JSON has no infinity; this is what vLLM writes for a token that was ruled out.
_LOWEST_LOGPROB = -9999.0

_LAST_ONLY = frozenset({"request_stats", "prompt_logprobs"})  # outputs of the last response alone


@dataclass(slots=True)
class _News:
    """One sequence: what no response has carried yet, and where it stands."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def clear(self) -> None:
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()


class Reply:
    """`echo` is put before the text of every sequence's first response; None leaves it out."""

    def __init__(
        self, params: SamplingParams, returns: Returns, stream: bool, echo: str | None = None
    ) -> None:
        self.params = params
        self._stream = stream
        self._with_logprobs = params.logprobs is not None
        self._sequences = [_News([echo] if echo else []) for _ in range(params.n)]
        self._num_prompt_tokens = 0
        self._stats: RequestStats | None = None
        self._prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None
        self._changed = self._finished = False
        self._outputs = ["text_output", *(f.name for f in fields(returns) if getattr(returns, f.name))]

    @property
    def streams(self) -> bool:
        return self._stream

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Of each sequence that has one by now."""
        return tuple(news.finish_reason for news in self._sequences if news.finish_reason)

    @property
    def stats(self) -> RequestStats | None:
        """Where the request's time went; None until its last delta."""
        return self._stats

    def add(self, delta: TextDelta) -> None:
        news = self._sequences[delta.index]
        news.text.append(delta.text if delta.embedding is None else json.dumps(delta.embedding))
        news.token_ids.extend(delta.token_ids)
        news.logprobs.extend(delta.logprobs)
        news.cumulative_logprob = delta.cumulative_logprob
        news.finish_reason = delta.finish_reason or news.finish_reason
        self._num_prompt_tokens = delta.num_prompt_tokens
        self._stats = delta.stats or self._stats
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        self._changed = True
        self._finished = self._finished or delta.request_finished

    def take(self) -> Tensors | None:
        """The next response, by output name, with an element per sequence; None while none is due."""
        if not self._changed or not (self._stream or self._finished):
            return None
        due = (name for name in self._outputs if self._finished or name not in _LAST_ONLY)
        tensors = {name: self._make(name) for name in due}
        for news in self._sequences:
            news.clear()
        self._changed = False
        return tensors

    def _make(self, name: str) -> NDArray[Any]:
        sequences = self._sequences
        match name:
            case "text_output":
                return strings("".join(news.text) for news in sequences)
            case "finish_reason":
                return strings(str(news.finish_reason) for news in sequences)
            case "cumulative_logprob":
                return np.array([news.cumulative_logprob for news in sequences], np.float32)
            case "logprobs":
                return strings(_json(news.logprobs) if self._with_logprobs else "null" for news in sequences)
            case "num_input_tokens":
                return np.array([self._num_prompt_tokens], np.uint32)
            case "num_output_tokens":
                return np.array([len(news.token_ids) for news in sequences], np.uint32)
            case "token_ids":
                return np.array([token for news in sequences for token in news.token_ids], np.int32)
            case "request_stats":
                assert self._stats is not None
                return strings([json.dumps(asdict(self._stats))])
            case "prompt_logprobs":
                return strings(["null" if self._prompt_logprobs is None else _json(self._prompt_logprobs)])
            case _:
                raise AssertionError(name)


def strings(values: Iterable[str]) -> NDArray[np.object_]:
    """A STRING tensor, [number of values]."""
    return np.array([value.encode() for value in values], np.object_)


def _json(logprobs: Iterable[tuple[Logprob, ...] | None]) -> str:
    """vLLM's shape: a list with an object for each token, from token id to what is known of it; null for a
    prompt's first token, which nothing was expected to be."""
    return json.dumps(
        [
            None
            if token is None
            else {
                entry.token_id: {
                    "logprob": max(entry.logprob, _LOWEST_LOGPROB),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for entry in token
            }
            for token in logprobs
        ]
    )
