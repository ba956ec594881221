"""From the responses of a server to typed results. Pure; shared by the twins and by all transports."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_client._errors import ProtocolError
from octavo_client._types import (
    Choice,
    Completion,
    Delta,
    Embedding,
    FinishReason,
    Logprob,
    RequestStats,
    TokenLogprobs,
    Usage,
)

Values = list[Any]  # of one tensor, texts as str


@dataclass(frozen=True, slots=True)
class Reply:
    """One response: the tensors that it has, by name."""

    outputs: Mapping[str, Values]
    model: str = ""
    version: str = ""


@dataclass(slots=True)
class _Sequence:
    """What has come of one sequence so far."""

    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None


class Answer:
    """Takes the replies to one request in turn. `num_replies` is how many have come."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._sequences: list[_Sequence] = []
        self._last = Reply({})
        self._prompt_tokens = 0
        self.num_replies = 0

    @property
    def finished(self) -> bool:
        """Whether each sequence has its finish reason."""
        return bool(self._sequences) and all(sequence.finish_reason for sequence in self._sequences)

    def add(self, reply: Reply) -> list[Delta]:
        """What is new in it, of each sequence with news. Raises `ProtocolError`."""
        self.num_replies += 1
        outputs = reply.outputs
        if "text_output" not in outputs:  # Triton's vLLM backend ends some answers with nothing
            return []
        try:
            return self._add(reply)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            what = f"a response that this client cannot read ({error!r}): {str(dict(outputs))[:200]}"
            raise ProtocolError(what, self._request_id) from error

    def _add(self, reply: Reply) -> list[Delta]:
        outputs = reply.outputs
        texts = outputs["text_output"]
        if not self._sequences:
            self._sequences = [_Sequence() for _ in texts]
        self._last = reply
        self._prompt_tokens = _at(outputs, "num_input_tokens", 0) or self._prompt_tokens
        first_token = 0
        deltas = []
        for index, (text, sequence) in enumerate(zip(texts, self._sequences, strict=True)):
            num_tokens = int(_at(outputs, "num_output_tokens", index) or 0)
            delta = Delta(
                text,
                index,
                num_tokens,
                _tokens(outputs, first_token, num_tokens),
                _logprobs(outputs, index),
                _at(outputs, "cumulative_logprob", index),
                _finish_reason(outputs, index) if sequence.finish_reason is None else None,
            )
            first_token += num_tokens
            _extend(sequence, delta)
            if delta.text or delta.num_tokens or delta.finish_reason:
                deltas.append(delta)
        return deltas

    def completion(self) -> Completion:
        """Of all that has come so far."""
        last = self._last
        stats = _at(last.outputs, "request_stats", 0)
        prompt = json.loads(_at(last.outputs, "prompt_logprobs", 0) or "null")
        return Completion(
            self._request_id,
            tuple(_choice(index, sequence) for index, sequence in enumerate(self._sequences)),
            Usage(self._prompt_tokens, sum(sequence.num_tokens for sequence in self._sequences)),
            last.model,
            last.version,
            RequestStats(**json.loads(stats)) if stats else None,
            None if prompt is None else tuple(None if entry is None else _entries(entry) for entry in prompt),
        )

    def embedding(self) -> Embedding:
        """For a request to embed, whose text is a list of numbers. Raises `ProtocolError`."""
        text = self.completion().text
        try:
            vector = tuple(float(number) for number in json.loads(text))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"no vector: {text[:80]!r}", self._request_id) from error
        return Embedding(self._request_id, vector, Usage(self._prompt_tokens))


def _at(outputs: Mapping[str, Values], name: str, index: int) -> Any:
    """None where the response has no such output."""
    values = outputs.get(name)
    return None if values is None else values[index]


def _tokens(outputs: Mapping[str, Values], first: int, count: int) -> tuple[int, ...] | None:
    """Those of one sequence: the output has those of all, one after the other."""
    if "token_ids" not in outputs:
        return None
    tokens = tuple(outputs["token_ids"][first : first + count])
    if len(tokens) != count:
        raise ValueError(f"{len(outputs['token_ids'])} token ids, fewer than num_output_tokens says")
    return tokens


def _logprobs(outputs: Mapping[str, Values], index: int) -> tuple[TokenLogprobs, ...] | None:
    entries = json.loads(_at(outputs, "logprobs", index) or "null")
    return None if entries is None else tuple(_entries(entry) for entry in entries)


def _entries(entry: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    return tuple(
        Logprob(int(token_id), of["logprob"], of["rank"], of["decoded_token"])
        for token_id, of in entry.items()
    )


def _finish_reason(outputs: Mapping[str, Values], index: int) -> FinishReason | None:
    reason = _at(outputs, "finish_reason", index)
    return None if reason in (None, "None") else reason  # the text "None" is the contract's


def _extend(sequence: _Sequence, delta: Delta) -> None:
    sequence.text.append(delta.text)
    sequence.num_tokens += delta.num_tokens
    if delta.token_ids is not None:
        sequence.token_ids = (sequence.token_ids or []) + list(delta.token_ids)
    if delta.logprobs is not None:
        sequence.logprobs = (sequence.logprobs or []) + list(delta.logprobs)
    sequence.cumulative_logprob = delta.cumulative_logprob
    sequence.finish_reason = sequence.finish_reason or delta.finish_reason


def _choice(index: int, sequence: _Sequence) -> Choice:
    return Choice(
        "".join(sequence.text),
        index,
        sequence.num_tokens,
        None if sequence.token_ids is None else tuple(sequence.token_ids),
        None if sequence.logprobs is None else tuple(sequence.logprobs),
        sequence.cumulative_logprob,
        sequence.finish_reason,
    )
