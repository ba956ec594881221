"""Malformed input: each kind gets its code and a text that names what is wrong, and nobody else notices."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.serving.launcher import RunningServer
from triton_clients import GrpcStream, connect, encode, generate, post

LONG = json.dumps({"temperature": 0, "max_tokens": 100, "ignore_eos": True})


@pytest.fixture(scope="module")
def bystander(llm: RunningServer) -> Iterator[GrpcStream]:
    """A good request that streams while the others are refused."""
    with GrpcStream(llm) as stream:
        stream.send(
            text_input="Once upon a time",
            stream=True,
            sampling_parameters=LONG,
            return_num_output_tokens=True,
        )
        first = stream.next()
        yield stream
        parts = [first, *stream.all()]
        assert sum(part.outputs["num_output_tokens"][0] for part in parts) == 100


def sampling(text: str) -> dict[str, str]:
    return {"text_input": "a", "sampling_parameters": text}


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "[INVALID_ARG] the request has no prompt; give exactly one of text_input, input_ids, messages"),
    ({"text_input": ""}, "[INVALID_ARG] the prompt is empty: it has no tokens"),
    ({"text_input": "a", "input_ids": [1]}, "[INVALID_ARG] the request has 'text_input' and 'input_ids'"),
    ({"text_input": "word " * 600}, "[INVALID_ARG] the prompt has 601 tokens; max_model_len is 512"),
    ({"input_ids": [1, 49152]}, "[INVALID_ARG] 'input_ids' holds 49152; allowed: 0 to 49151"),
    ({"input_ids": [-1]}, "[INVALID_ARG] 'input_ids' holds -1"),
    ({"messages": "hello"}, "[INVALID_ARG] 'messages' is not valid JSON"),
    ({"messages": '[{"role": "user"}]'}, "[INVALID_ARG] message 0 must have a 'content'"),
    ({"text_input": "a", "image": ["aGk="]}, "[INVALID_ARG] 'image' is not supported by this version"),
    ({"text_input": "a", "embedding_request": "{}"}, "[INVALID_ARG] the request has 'embedding_request' and"),
    ({"embedding_request": "{}"}, "[INVALID_ARG] 'embedding_request' has no 'input'"),
    (
        {"embedding_request": '{"input": "a", "pooling_params": {"dimensions": 577}}'},
        "[INVALID_ARG] 'dimensions' is 577; allowed: 1 to 576",
    ),
    (
        {"text_input": "a", "octavo_deadline_ms": -1},
        "[INVALID_ARG] 'octavo_deadline_ms' is -1; expected milli",
    ),
    ({"text_input": "a", "timeout": "soon"}, "[INVALID_ARG] 'timeout' is 'soon'; expected microseconds"),
    ({"text_input": "a", "temprature": 1}, "[INVALID_ARG] unknown sampling parameter 'temprature'; did you"),
    ({"text_input": "a", "octavo_rank": 1}, "[INVALID_ARG] unknown request parameter 'octavo_rank'"),
    (
        {"text_input": "a", "stream": True, "exclude_input_in_output": False},
        "[INVALID_ARG] 'exclude_input_in",
    ),
    ({"text_input": "a", "cancel_request_id": "b"}, "[INVALID_ARG] 'cancel_request_id' stands alone"),
    ({"cancel_request_id": "nobody"}, "[NOT_FOUND] no open request has the id 'nobody'"),
    (sampling("{"), "[INVALID_ARG] 'sampling_parameters' is not valid JSON"),
    (sampling("[1]"), "[INVALID_ARG] 'sampling_parameters' is JSON of a list; expected an object"),
    (sampling('{"temperature": NaN}'), "[INVALID_ARG] 'sampling_parameters' holds NaN"),
    (sampling('{"n": 1, "n": 2}'), "[INVALID_ARG] 'sampling_parameters' has the key 'n' twice"),
    (sampling("[" * 100_000), "[INVALID_ARG] 'sampling_parameters' is JSON that is nested too deeply"),
    (sampling('{"temperature": -1}'), "[INVALID_ARG] 'temperature' is -1.0; allowed: 0 to 100"),
    (sampling('{"max_tokens": 0}'), "[INVALID_ARG] 'max_tokens' is 0; allowed: 1 and more"),
    (sampling('{"top_p": "much"}'), "[INVALID_ARG] 'top_p' is 'much'; expected a number"),
    (sampling('{"n": 64}'), "[INVALID_ARG] 'n' is 64; this server runs at most 32 sequences"),
    (sampling('{"guided_regex": "a"}'), "[INVALID_ARG] sampling parameter 'guided_regex' is not supported"),
    (sampling('{"stop_token_ids": [99999]}'), "[INVALID_ARG] 'stop_token_ids' holds 99999"),
    (sampling(r'{"stop": "\ud800"}'), "[INVALID_ARG] 'sampling_parameters' holds half of a surrogate pair"),
    ({"text_input": "x" * (9 << 20)}, "[INVALID_ARG] 'text_input' has 9437184 bytes; allowed: 8388608"),
]


@pytest.mark.parametrize(("inputs", "words"), CASES, ids=[words[:60] for _, words in CASES])
def test_http_answers_400_with_the_reason(
    llm: RunningServer, bystander: GrpcStream, inputs: dict[str, Any], words: str
) -> None:
    status, answer = post(llm, "generate", inputs)
    assert status == 400
    assert answer.keys() == {"error"}
    assert answer["error"].startswith(words)
    assert len(answer["error"]) < 500
    assert "Traceback" not in answer["error"]


@pytest.mark.parametrize(
    ("inputs", "status", "words"),
    [
        (sampling('{"n": 0}'), "INVALID_ARGUMENT", "[INVALID_ARG] 'n' is 0"),
        ({"cancel_request_id": "nobody"}, "NOT_FOUND", "[NOT_FOUND] no open request has the id"),
    ],
)
def test_grpc_carries_tritons_code_and_the_reason(
    llm: RunningServer, inputs: dict[str, Any], status: str, words: str
) -> None:
    with GrpcStream(llm) as stream:
        error = stream.send(**inputs).error()
    assert error.startswith(f"[StatusCode.{status}] {words}")


def test_a_stream_over_http_ends_with_the_error_as_its_only_event(llm: RunningServer) -> None:
    connection = connect(llm)
    connection.request("POST", "/v2/models/llm/generate_stream", encode(sampling('{"n": 0}')))
    answer = connection.getresponse().read().decode()
    connection.close()
    assert answer.strip() == """data: {"error":"[INVALID_ARG] 'n' is 0; allowed: 1 to 128"}"""


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"text_input": 3}', b'{"text_input": "a", "stop": ["b"]}']
)
def test_what_triton_itself_cannot_read_does_no_harm(llm: RunningServer, body: bytes) -> None:
    status, answer = post(llm, "generate", body)
    assert status in (400, 500)
    assert answer.keys() == {"error"}


def test_prompts_of_megabytes_are_refused_before_seconds_are_spent_on_them(llm: RunningServer) -> None:
    text = "many words " * 400_000
    chat = json.dumps([{"role": "user", "content": text}])
    for prompt in ({"text_input": text}, {"messages": chat[:1_000_000] + '"}]'}):
        started = time.monotonic()
        status, answer = post(llm, "generate", prompt)
        assert status == 400
        assert " characters; max_model_len is 512 tokens, and at most " in answer["error"]
        assert time.monotonic() - started < 2


def test_the_server_is_as_good_as_before(llm: RunningServer) -> None:
    assert generate(llm, text_input="Hello", max_tokens=1)["text_output"].startswith("Hello")


@pytest.mark.parametrize("field", ["id", "cache_salt"])
def test_bytes_that_are_not_utf8_in_an_id_or_a_parameter(llm: RunningServer, field: str) -> None:
    status, answer = post(llm, "generate", b'{"text_input": "a", "' + field.encode() + b'": "\xff"}')
    assert status == 400
    assert answer["error"].startswith("[INVALID_ARG] the request's id or a parameter is not UTF-8")
