"""`/v1/chat/completions`: what the server is asked, and what comes of its answer."""

import asyncio
import json
from typing import Any

import pytest

from gateways import HELLO, asked, chat, events
from octavo_client import InvalidArgument, MockTransport, Reply, Unavailable, WireRequest

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def post(mock: MockTransport, body: Any, path: str = "/v1/chat/completions", **settings: Any) -> Any:
    async def ask() -> Any:
        async with asked(mock, **settings) as client:
            return await client.post(path, json=body)

    return asyncio.run(ask())


def test_an_answer_at_once() -> None:
    mock = MockTransport(lambda _: ["Hi", " you"])
    response = post(mock, chat(temperature=0, seed=3, stop="x", top_k=4, max_completion_tokens=7, user="me"))
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"] == "chatcmpl-" + response.headers["x-request-id"]
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi you", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 2
    (request,) = mock.requests
    assert request.prompt == HELLO
    assert request.sampling == {"temperature": 0.0, "seed": 3, "stop": "x", "top_k": 4, "max_tokens": 7}


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    mock = MockTransport(lambda _: "Hi")
    post(mock, chat(max_tokens=None))
    assert mock.requests[0].sampling == {"max_tokens": 2**31 - 1}


def test_a_stream_has_roles_texts_a_reason_and_the_usage() -> None:
    response = post(
        MockTransport(lambda _: ["Hi", ' "ü"']), chat(stream=True, stream_options={"include_usage": True})
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": ' "ü"'},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, "stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_without_include_usage_there_is_none() -> None:
    chunks = events(post(MockTransport(lambda _: ["a"]), chat(stream=True)).text)[:-1]
    assert len(chunks) == 2
    assert all("usage" not in chunk for chunk in chunks)


def two(request: WireRequest) -> list[Reply]:
    def reply(first: str, second: str, reasons: list[str]) -> Reply:
        outputs = {"text_output": [first, second], "finish_reason": reasons, "num_output_tokens": [1, 1]}
        return Reply({**outputs, "num_input_tokens": [3]})

    return [reply("a", "b", ["None", "None"]), reply("c", "d", ["stop", "length"])]


def test_several_sequences_stream_side_by_side() -> None:
    chunks = events(post(MockTransport(two), chat(stream=True, n=2)).text)[:-1]
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons) == ({0: "ac", 1: "bd"}, {0: "stop", 1: "length"})


def with_logprobs(_: WireRequest) -> list[Reply]:
    entry = {
        "7": {"logprob": -1.5, "rank": 2, "decoded_token": "é"},
        "8": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
    }
    outputs = {"text_output": ["é"], "finish_reason": ["stop"], "num_output_tokens": [1]}
    return [Reply({**outputs, "logprobs": [json.dumps([entry])]})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("most", "tops"), [(None, []), (1, ["x"]), (2, ["x", "é"])])
def test_logprobs(stream: bool, most: int | None, tops: list[str]) -> None:
    mock = MockTransport(with_logprobs)
    response = post(mock, chat(logprobs=True, top_logprobs=most, stream=stream))
    answer = events(response.text)[1] if stream else response.json()
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("é", -1.5, [0xC3, 0xA9])
    assert [top["token"] for top in token["top_logprobs"]] == tops
    assert mock.requests[0].sampling["logprobs"] == (most or 0)


def test_tools_go_to_the_template_and_calls_come_back() -> None:
    mock = MockTransport(lambda _: ["I add. ", CALL])
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}]
    choice = post(mock, chat(messages=messages, tools=[TOOL])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add. "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    sent = json.loads(str(mock.requests[0].inputs["messages"]))
    assert sent == {"messages": messages, "tools": [TOOL]}
    assert mock.requests[0].sampling["skip_special_tokens"] is False


def test_calls_stream_as_deltas() -> None:
    mock = MockTransport(lambda _: ["I ", "add. <tool", CALL[5:], ""])
    chunks = events(post(mock, chat(tools=[TOOL], stream=True)).text)[1:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"content": "I "}, {"content": "add. "}]
    (call,) = deltas[2]["tool_calls"]
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a": 1}'})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_choice_none_leaves_the_tools_out() -> None:
    mock = MockTransport(lambda _: CALL)
    choice = post(mock, chat(tools=[TOOL], tool_choice="none")).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert mock.requests[0].prompt == HELLO
    assert str(mock.requests[0].inputs["messages"]).startswith("[")


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "json"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "json"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}, "json"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_what_shapes_an_answer_is_passed_on(body: dict[str, Any], structure: str | None) -> None:
    mock = MockTransport(lambda _: "{}")
    assert post(mock, chat(**body)).status_code == 200
    found = mock.requests[0].sampling.get("structured_outputs")
    assert structure is None if found is None else structure in found


def test_messages_in_parts_and_by_a_developer_are_made_plain() -> None:
    mock = MockTransport(lambda _: "Hi")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    post(mock, chat(messages=messages))
    assert mock.requests[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
    ]


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"model": None}, "model", "the field 'model' is missing"),
        ({"functions": []}, "functions", "unknown field 'functions'"),
        ({"temperature": "warm"}, "temperature", "'temperature'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs' to be true"),
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        ({"response_format": {"type": "yaml"}}, "response_format", "must be of the type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "'image_url'; this version reads text only",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_server_is_asked(
    change: dict[str, Any], param: str, text: str
) -> None:
    mock = MockTransport(lambda _: "Hi")
    response = post(mock, chat(**change))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert text in error["message"]
    assert mock.requests == []


def failing(_: WireRequest) -> Any:
    raise InvalidArgument("'temperature' is -1.0; allowed: 0 to 100")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_status_even_for_a_stream(stream: bool) -> None:
    response = post(MockTransport(failing), chat(stream=stream, temperature=-1))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def breaking(_: WireRequest) -> Any:
    yield "a"
    raise Unavailable("the server is shutting down")


def test_a_stream_that_breaks_says_so_and_is_not_done() -> None:
    response = post(MockTransport(breaking), chat(stream=True))
    assert response.status_code == 200
    *_, last = events(response.text)
    assert last["error"]["message"] == "the server is shutting down"
    assert last["error"]["type"] == "server_error"
