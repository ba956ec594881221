"""Whatever a request holds, reading it gives a call or a typed error; nothing else comes out, and soon.

`make fuzz` draws 10,000 requests, which takes a minute; by default there are fewer, to keep the suite short.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidArgument, NotFound, OctavoError
from octavo.serving import codec, request_parameters
from raw_requests import INPUTS
from wild_requests import json_text, parameters, requests

EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "1500"))
FLAVOURS = {"BOOL": np.bool_, "INT32": np.int32, "STRING": np.object_}


def tensors(request: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for name, value in request.items():
        if name in INPUTS:
            values = value if isinstance(value, list) else [value]
            arrays[name] = np.array(values, FLAVOURS[INPUTS[name].data_type])
    return arrays


def read(
    inputs: Mapping[str, np.ndarray[Any, Any]], text: str
) -> codec.Generate | codec.Embed | codec.Cancel | OctavoError:
    """All that is done with a request before an engine is asked."""
    try:
        codec.check_sizes(inputs, text)
        request_parameters.time_limit_s(text)
        return codec.parse(inputs, text)
    except OctavoError as error:
        return error


@settings(max_examples=EXAMPLES, deadline=10_000)
@given(request=requests(), sent=st.none() | json_text(parameters()))
def test_a_request_is_a_call_or_a_typed_error(request: dict[str, Any], sent: str | None) -> None:
    """`sent` in place of the request's own parameters: Triton sends an object, but who knows."""
    own = json.dumps({name: value for name, value in request.items() if name not in INPUTS})
    outcome = read(tensors(request), own if sent is None else sent)
    if isinstance(outcome, OctavoError):
        assert isinstance(outcome, (InvalidArgument, NotFound))
        assert outcome.wire.startswith(f"[{outcome.code}] ")
        assert outcome.wire.isprintable()
        assert len(outcome.wire) < 2000
    else:
        assert isinstance(outcome, (codec.Generate, codec.Embed, codec.Cancel))


@pytest.mark.parametrize("name", ["text_input", "stream", "input_ids", "messages", "cancel_request_id"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_tensor_of_another_length_is_named(name: str, count: int) -> None:
    """Triton lets none through; an in-process caller may."""
    kind = INPUTS[name].data_type
    array = np.array([b"a"] * count, np.object_) if kind == "STRING" else np.zeros(count, FLAVOURS[kind])
    if name == "input_ids":
        assert codec.parse({name: array}) == codec.Generate((0,) * count, codec.SamplingParams(), echo=True)
        return
    inputs = {name: array} | ({"text_input": np.array([b"a"], np.object_)} if name == "stream" else {})
    with pytest.raises(InvalidArgument, match=f"'{name}' has {count} elements; expected 1"):
        codec.parse(inputs)
