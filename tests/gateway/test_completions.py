"""`/v1/completions`, `/v1/embeddings` and `/v1/models`."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest

from gateways import asked, completion, events
from octavo_client import MockTransport, Reply, WireRequest


def ask(mock: MockTransport, path: str, body: Any = None, **settings: Any) -> Any:
    async def run() -> Any:
        async with asked(mock, **settings) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(run())


def echo(request: WireRequest) -> list[str]:
    return [f"<{request.prompt}>", "!"]


def test_one_prompt() -> None:
    mock = MockTransport(echo)
    answer = ask(mock, "/v1/completions", completion(max_tokens=3, logit_bias={"7": -100})).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "<Hello>!", "logprobs": None, "finish_reason": "stop"}]
    assert mock.requests[0].sampling == {"max_tokens": 3, "logit_bias": {"7": -100.0}}
    assert mock.requests[0].inputs["exclude_input_in_output"] is True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([1, 2], ["<(1, 2)>!"]), (["a", "b"], ["<a>!", "<b>!"]), ([[1], [2, 3]], ["<(1,)>!", "<(2, 3)>!"])],
)
def test_several_prompts_and_ids(prompt: Any, texts: list[str], stream: bool) -> None:
    mock = MockTransport(echo)
    options = {"include_usage": True} if stream else None
    response = ask(mock, "/v1/completions", completion(prompt=prompt, stream=stream, stream_options=options))
    found = [""] * len(texts)
    chunks = events(response.text)[:-1] if stream else [response.json()]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] += choice["text"]
    assert found == texts
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * len(texts)
    assert len({request.request_id for request in mock.requests}) == len(texts)


def test_echo() -> None:
    mock = MockTransport(lambda _: ["!"])
    response = ask(mock, "/v1/completions", completion(echo=True, stream=True))
    assert events(response.text)[0]["choices"][0]["text"] == "Hello!"
    ask(mock, "/v1/completions", completion(echo=True))
    assert mock.requests[1].inputs["exclude_input_in_output"] is False


def test_logprobs_have_offsets_that_go_on_through_a_stream() -> None:
    def reply(text: str, reason: str) -> Reply:
        entries = [{"7": {"logprob": -1.0, "rank": 1, "decoded_token": text}}]
        outputs = {"text_output": [text], "finish_reason": [reason], "num_output_tokens": [1]}
        return Reply({**outputs, "logprobs": [json.dumps(entries)]})

    mock = MockTransport(lambda _: [reply("ab", "None"), reply("c", "stop")])
    chunks = events(ask(mock, "/v1/completions", completion(stream=True, logprobs=0)).text)[:-1]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [one["text_offset"] for one in found] == [[0], [2]]
    assert found[1]["tokens"] == ["c"]
    assert found[1]["top_logprobs"] == [{"c": -1.0}]


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"suffix": "end"}, "suffix", "'suffix' is not supported"),
        ({"echo": True, "logprobs": 1}, "echo", "'echo' with 'logprobs' is not supported"),
        ({"echo": True, "stream": True, "prompt": [1]}, "echo", "of token ids cannot stream"),
        ({"prompt": []}, "prompt", "an empty list"),
        ({"prompt": ["a"] * 65}, "prompt", "has 65 entries; this gateway allows 64"),
        ({"prompt": {"a": 1}}, "prompt", "'prompt"),
    ],
)
def test_refusals(change: dict[str, Any], param: str, text: str) -> None:
    response = ask(MockTransport(echo), "/v1/completions", completion(**change))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert text in error["message"]


def vector(_: WireRequest) -> str:
    return "[0.6, 0.8]"


def test_embeddings_as_numbers_and_as_bytes() -> None:
    mock = MockTransport(vector)
    body = {"model": "llm", "input": ["a", "b"], "dimensions": 2, "pooling": "mean"}
    answer = ask(mock, "/v1/embeddings", body).json()
    assert [one["embedding"] for one in answer["data"]] == [[0.6, 0.8]] * 2
    assert [one["index"] for one in answer["data"]] == [0, 1]
    asked_for = json.loads(str(mock.requests[0].inputs["embedding_request"]))
    assert asked_for == {"input": "a", "pooling_params": {"pooling": "mean", "dimensions": 2}}
    body = {"model": "llm", "input": [1, 2], "encoding_format": "base64"}
    (one,) = ask(mock, "/v1/embeddings", body).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == pytest.approx((0.6, 0.8))


MODELS = [
    {"name": "llm", "version": "1", "state": "READY"},
    {"name": "big", "version": "1", "state": "LOADING"},
]


def test_models_that_are_ready_and_their_aliases() -> None:
    mock = MockTransport(echo, models=MODELS)
    aliases = {"gpt-4o": "llm", "x": "big"}
    listed = ask(mock, "/v1/models", aliases=aliases).json()["data"]
    assert [model["id"] for model in listed] == ["gpt-4o", "llm"]
    assert ask(mock, "/v1/models/gpt-4o", aliases=aliases).json()["object"] == "model"
    missing = ask(mock, "/v1/models/big")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    answer = ask(mock, "/v1/completions", completion(model="gpt-4o"), aliases=aliases).json()
    assert (mock.requests[0].model, answer["model"]) == ("llm", "gpt-4o")


@pytest.mark.parametrize(
    ("ready", "metrics", "status"),
    [
        (True, "", 200),
        (True, 'octavo:ready{model="llm"} 1\n', 200),
        (True, 'octavo:ready{model="llm"} 0\n', 503),
        (True, 'octavo:ready{model="other"} 0\n', 200),
        (False, "", 503),
    ],
)
def test_readiness_is_what_the_server_and_its_metric_say(ready: bool, metrics: str, status: int) -> None:
    mock = MockTransport(echo, ready=ready, metrics=metrics)
    assert ask(mock, "/health/ready").status_code == status
    assert ask(mock, "/health").status_code == 200
