"""Tool calls in what a model says: which part of its text is calls, as it streams in.

Models write calls in one of three ways, which their chat templates teach them:

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Qwen, Hermes, SmolLM3
    llama3    {"name": ..., "parameters": {...}}, all there is            Llama 3; <|python_tag|> may precede
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]        or NAME[ARGS]{...} after the mark

`auto` knows all of them by how a call begins. Text outside of calls is given out at once, but for what may
still become the beginning of one. A call is given out when it is whole, those of llama3 and mistral at the
end. What begins like a call and is none is text, and nothing of it is lost. Pure; used by `chat`.
"""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MISTRAL = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_MARKS: dict[str, tuple[str, ...]] = {"hermes": (_BEGIN,), "llama3": (_PYTHON_TAG,), "mistral": (_MISTRAL,)}
_MARKS["auto"] = (_BEGIN, _PYTHON_TAG, _MISTRAL)
_ENDS_OF_TURN = ("<|eom_id|>", "<|eot_id|>", "<|im_end|>", "</s>")  # when special tokens are let through
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`index` counts a message's calls; `arguments` is JSON, as the model wrote it or nearly so."""

    index: int
    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Piece = str | ToolCall


class ToolParser:
    """Reads one sequence. `names` are the functions that were offered."""

    def __init__(self, style: str, names: Collection[str]) -> None:
        self._marks = _MARKS[style]
        self._bare_json = style in ("auto", "llama3")
        self._names = names
        self._held = ""  # what has come and was not given out
        self._mark: str | None = None  # the one that `_held` follows: a call is being read
        self._began = False  # whether there was text already
        self._drops_space = False  # a call has ended: the line break after it is no text
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """At the end of the sequence: what was held."""
        if self._mark is None:
            return self._text(self._held)
        held = self._held
        for end in _ENDS_OF_TURN:
            held = held.removesuffix(end)
        calls = self._calls(held.removesuffix(_END) if self._mark == _BEGIN else held)
        return list(calls) if calls else self._text(self._mark + self._held)

    def _step(self, pieces: list[Piece]) -> bool:
        """Whether there may be more to take from what is held."""
        if self._mark == _BEGIN:
            body, end, rest = self._held.partition(_END)
            if not end:
                return False
            calls = self._calls(body)
            pieces += calls or self._text(_BEGIN + body + _END)
            self._mark, self._held, self._drops_space = None, rest, bool(calls)
            return True
        if self._mark is not None:
            return False
        if self._bare_json and not self._began and self._held.lstrip()[:1] == "{":
            self._mark = ""
            return False
        places = [(self._held.find(mark), mark) for mark in self._marks]
        found = min(((at, mark) for at, mark in places if at >= 0), default=None)
        if found is not None:
            at, self._mark = found
            before, self._held = self._held[:at], self._held[at + len(self._mark) :]
            pieces += self._text(before)
            return True
        keep = max(_overlap(self._held, mark) for mark in self._marks)
        if self._bare_json and not self._began and not self._held.strip():
            keep = len(self._held)  # spaces before what may be a call
        cut = len(self._held) - keep
        before, self._held = self._held[:cut], self._held[cut:]
        pieces += self._text(before)
        return False

    def _text(self, text: str) -> list[Piece]:
        if self._drops_space:
            text = text.lstrip()
        if not text:
            return []
        self._drops_space = False
        self._began = True
        return [text]

    def _calls(self, body: str) -> list[ToolCall]:
        """Of a whole body; none where it is no call."""
        try:
            if self._mark == _BEGIN:
                found = [json.loads(body)]
            elif self._mark == _MISTRAL:
                found = _after_mistral(body)
            else:
                found = _several(body)
                if any(value["name"] not in self._names for value in found):
                    return []
            read = [_name_and_arguments(value) for value in found]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        calls = []
        for name, arguments in read:
            # Nine letters and digits: Mistral's templates refuse others.
            calls.append(ToolCall(self.num_calls, uuid.uuid4().hex[:9], name, arguments))
            self.num_calls += 1
        return calls


def _overlap(text: str, mark: str) -> int:
    """How much of the end of the text may be the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def _several(body: str) -> list[Any]:
    """Values one after the other, with semicolons or spaces between. Raises ValueError."""
    values = []
    body = body.strip()
    while body:
        value, end = _DECODER.raw_decode(body)
        values.append(value)
        body = body[end:].lstrip("; \n")
    return values


def _after_mistral(body: str) -> list[Any]:
    body = body.strip()
    if body.startswith("["):
        value, end = _DECODER.raw_decode(body)
        if body[end:].strip() or not isinstance(value, list):
            raise ValueError
        return value
    calls = []
    for part in body.split(_MISTRAL):
        name, brace, arguments = part.partition("{")
        name = name.partition(_ARGS)[0].strip()
        if not brace or not name:
            raise ValueError
        calls.append({"name": name, "arguments": json.loads(brace + arguments)})
    return calls


def _name_and_arguments(value: Any) -> tuple[str, str]:
    """Raises KeyError, TypeError or ValueError where it is no call."""
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        raise TypeError
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError
    name.encode()  # a ValueError for half of a surrogate pair, which no answer could hold
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return name, text
