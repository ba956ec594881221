"""Hypothesis strategies: requests that are right, nearly right, and nothing like a request.

A request is a mapping as in `raw_requests`. JSON in it is text, so that it may be broken as well.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from octavo.request import SAMPLING_NAMES
from octavo.serving import codec

# What a server is to compute is kept short: a length that is allowed is one of these.
LENGTHS = (1, 2, 3, "2", 2.0, 0, -1, 2**31)
EDGES = (0, 1, -1, 2, 128, 129, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, 1e-320, 1e-40, 1e308, -0.0)
WORDS = ("", "0", "-1", "1e9", "nan", "inf", "true", "False", "1_0", "\0", "\n", "\ud800", "é", "<|im_end|>")
PIECES = ("", "{", "}", "[", "]", '"', ",", ":", "\\", "\\ud800", "NaN", "9" * 5000, "\0")
OWN_NAMES = (
    "octavo_priority",
    "octavo_deadline_ms",
    "cache_salt",
    "tenant",
    "timeout",
    "octavo_",
    "triton_x",
)

scalars = st.one_of(
    st.integers(0, 3),
    st.none() | st.booleans(),
    st.integers() | st.floats(),
    st.sampled_from(EDGES) | st.sampled_from(WORDS),
    st.text(max_size=8),
)
values = st.one_of(
    scalars,
    st.floats(0, 1),
    st.lists(scalars, max_size=3),
    st.dictionaries(st.integers(0, 5).map(str) | st.text(max_size=4), scalars, max_size=3),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)
    ),
)
names = st.sampled_from(sorted(SAMPLING_NAMES))
rarely = st.integers(0, 9).map(lambda number: number == 7)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.dictionaries(names | st.text(max_size=8) if draw(rarely) else names, values, max_size=3))
    return {**chosen, "max_tokens": draw(st.sampled_from(LENGTHS))}


messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", 1]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=3,
)
pooling = st.fixed_dictionaries(
    {}, optional={"dimensions": values, "pooling": st.sampled_from(["mean", "x"])}
)
embeddings = st.fixed_dictionaries(
    {"input": st.text(max_size=20) | st.lists(st.integers(-1, 50_000), max_size=4) | values},
    optional={"pooling_params": pooling | values},
)


def nested(depth: int) -> str:
    return '{"stop": ' + "[" * depth + "]" * depth + "}"


def broken(text: str, place: float, piece: str, keep: bool) -> str:
    """With a piece of JSON put, or everything cut off, somewhere in it."""
    index = math.floor(place * len(text))
    return text[:index] + piece + (text[index:] if keep else "")


@st.composite
def json_text(draw: st.DrawFn, meant: st.SearchStrategy[Any]) -> str:
    """NaN and half pairs come out as Python writes them."""
    text = json.dumps(draw(values) if draw(rarely) else draw(meant))
    match draw(st.integers(0, 9)):
        case 7:
            return broken(text, draw(st.floats(0, 1)), draw(st.sampled_from(PIECES)), draw(st.booleans()))
        case 8:
            return nested(draw(st.integers(1, 1500)))
        case 9:
            return draw(st.text(max_size=20))
        case _:
            return text


@st.composite
def as_bytes(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> bytes:
    return draw(st.binary(max_size=9)) if draw(rarely) else draw(texts).encode("utf-8", "surrogatepass")


_CONTENTS: Mapping[str, st.SearchStrategy[Any]] = {
    "text_input": as_bytes(st.text(max_size=30) | st.sampled_from(WORDS)),
    "image": st.lists(st.binary(max_size=3), max_size=1),
    "sampling_parameters": as_bytes(json_text(parameters())),
    "embedding_request": as_bytes(json_text(embeddings)),
    "input_ids": st.lists(st.sampled_from([0, 1, 5, 300, 49151, 49152, -1, 2**31 - 1]), max_size=4),
    "messages": as_bytes(json_text(messages)),
    "cancel_request_id": as_bytes(st.text(max_size=4)),
}
_FLAGS = {spec.name: st.booleans() for spec in codec.INPUTS if spec.data_type == "BOOL"}
_PROMPTS = ("text_input", "input_ids", "messages", "embedding_request", "cancel_request_id")


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly with one prompt, so that what comes after it is reached."""
    chosen = {draw(st.sampled_from(("text_input",) * 5 + _PROMPTS))}
    if chosen != {"cancel_request_id"} and draw(st.integers(0, 3)):
        chosen.add("sampling_parameters")
    if draw(rarely):
        chosen.add(draw(st.sampled_from(sorted(_CONTENTS))))
    request = {name: draw(_CONTENTS[name]) for name in sorted(chosen)}
    request |= draw(st.dictionaries(st.sampled_from(sorted(_FLAGS)), st.booleans(), max_size=2))
    if "sampling_parameters" not in request:
        request["max_tokens"] = draw(st.sampled_from([0, 1, 2, "2", "x", 2**40]))
    if draw(rarely):
        others = st.one_of(names.filter(lambda name: name != "max_tokens"), st.sampled_from(OWN_NAMES))
        request |= draw(st.dictionaries(others, scalars.filter(lambda value: value is not None), max_size=2))
    return request
