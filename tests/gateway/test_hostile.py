"""Bodies and answers made to break the gateway: it refuses or reads them, quickly and in little memory."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from gateways import asked, chat, completion, events
from octavo_client import InvalidArgument, MockTransport, WireRequest
from octavo_gateway.errors import ApiError
from octavo_gateway.schemas import ChatBody, CompletionBody, parse
from octavo_gateway.tools import ToolCall, ToolParser


def post(body: bytes, path: str = "/v1/completions", mock: MockTransport | None = None) -> Any:
    async def ask() -> Any:
        async with asked(mock or MockTransport(lambda _: "Hi")) as client:
            return await client.post(path, content=body, headers={"Content-Type": "application/json"})

    return asyncio.run(ask())


@pytest.mark.parametrize("field", ["model", "prompt", "tenant", "stop"])
def test_half_of_a_surrogate_pair_is_refused(field: str) -> None:
    response = post(json.dumps(completion(**{field: "\ud83d"})).encode())
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]


def test_a_whole_surrogate_pair_is_a_character() -> None:
    mock = MockTransport(lambda _: "Hi")
    assert post(json.dumps(completion(prompt="\U0001f600")).encode(), mock=mock).status_code == 200
    assert mock.requests[0].prompt == "\U0001f600"


@pytest.mark.parametrize("body", [b'{"model":"\xed\xa0\x80"}', '{"model":"llm"}'.encode("utf-16")])
def test_what_is_not_utf_8_is_refused(body: bytes) -> None:
    assert post(body).json()["error"]["message"].startswith("the body is not valid JSON")


@pytest.mark.parametrize("priority", [2**31, -(2**70)])
def test_a_priority_too_large_for_the_wire_is_refused(priority: int) -> None:
    response = post(json.dumps(completion(priority=priority)).encode())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize(
    ("kind", "values", "param"),
    [
        (CompletionBody, {"model": "llm", "prompt": [1, "a"] * 50_000}, "prompt"),
        (ChatBody, chat(messages=[1] * 100_000), "messages"),
        (ChatBody, chat(logit_bias={f"a{i}": 1 for i in range(100_000)}), "logit_bias"),
        (ChatBody, chat(**{f"a{i}": 1 for i in range(100_000)}), "a0"),
        (ChatBody, chat(stream_options={f"a{i}": 1 for i in range(100_000)}), "stream_options"),
    ],
)
def test_a_hundred_thousand_mistakes_are_one(kind: Any, values: dict[str, Any], param: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            parse(kind, values)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert peak_bytes < 12 << 20  # each mistake as an object takes more


@pytest.mark.parametrize("body", [chat(n=10**12, stream=True), completion(n=10**12, stream=True)])
def test_nothing_is_made_for_each_of_n_before_the_server_allows_it(body: dict[str, Any]) -> None:
    def refuse(_: WireRequest) -> str:
        raise InvalidArgument("'n' is too large; allowed: 1 to 128")

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = post(json.dumps(body).encode(), path, MockTransport(refuse))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("value", [r'{"a": "\ud800"}', '{"a": NaN}', '{"a": 1e999}', '"5"', '"[1]"', "null"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_whose_arguments_cannot_be_sent_is_text(value: str, stream: bool) -> None:
    said = f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>'
    tool = {"type": "function", "function": {"name": "add"}}
    body = json.dumps(chat(tools=[tool], stream=stream)).encode()
    response = post(body, "/v1/chat/completions", MockTransport(lambda _: said))
    assert response.status_code == 200
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.text)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == said
    else:
        assert response.json()["choices"][0]["message"]["content"] == said


def test_a_call_of_an_unknown_function_beside_a_known_one_is_not_lost() -> None:
    said = '{"name": "add", "parameters": {}}; {"name": "other", "parameters": {}}'
    parser = ToolParser("llama3", ["add"])
    assert parser.feed(said) + parser.close() == [said]
    both = ToolParser("llama3", ["add", "other"])
    calls = both.feed(said) + both.close()
    assert [call.name for call in calls if isinstance(call, ToolCall)] == ["add", "other"]
