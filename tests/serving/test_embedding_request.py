"""Embeddings as Triton's vLLM backend takes and gives them: JSON in, one response with a vector in JSON."""

import json
from typing import Any

import numpy as np
import pytest

from fakes import LoadedModel, as_array
from octavo.errors import InvalidArgument
from octavo.request import PoolingParams
from octavo.serving import codec, embedding_request


def embed(**values: Any) -> str:
    return json.dumps(values)


@pytest.mark.parametrize(
    ("values", "prompt", "pooling"),
    [
        ({"input": "hello"}, "hello", PoolingParams("last", None)),
        ({"input": [1, 2, 3], "pooling_params": {}}, (1, 2, 3), PoolingParams("last", None)),
        ({"input": "a", "pooling_params": None}, "a", PoolingParams("last", None)),
        ({"input": "a", "pooling_params": {"dimensions": 64}}, "a", PoolingParams("last", 64)),
        ({"input": "a", "pooling_params": {"dimensions": [64]}}, "a", PoolingParams("last", 64)),
        ({"input": "a", "pooling_params": {"pooling": "mean"}}, "a", PoolingParams("mean", None)),
    ],
)
def test_what_to_embed_and_how(values: dict[str, Any], prompt: Any, pooling: PoolingParams) -> None:
    assert embedding_request.parse(json.dumps(values)) == (prompt, pooling)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "'embedding_request' is not valid JSON"),
        ("[1]", "'embedding_request' is JSON of a list; expected an object"),
        ("{}", "'embedding_request' has no 'input': a text, or a list of token ids"),
        ('{"input": 5}', "'input' is a number; expected a text or a list of token ids"),
        ('{"input": null}', "'input' is null; expected a text or a list of token ids"),
        ('{"input": ["a", "b"]}', "'input' holds 'a' at 0; expected token ids only"),
        ('{"input": [1, true]}', "'input' holds True at 1; expected token ids only"),
        ('{"input": [1.5]}', "'input' holds 1.5 at 0; expected token ids only"),
        ('{"inputs": "a"}', "'embedding_request' has the unknown key 'inputs'; did you mean 'input'?"),
        ('{"input": "a", "zzz": 1}', "has the unknown key 'zzz'; known: input, pooling_params"),
        ('{"input": "a", "pooling_params": []}', "'pooling_params' is a list; expected an object"),
        (
            '{"input": "a", "pooling_params": {"dimension": 1}}',
            "'pooling_params' has the unknown key 'dimension'; did you mean 'dimensions'?",
        ),
        ('{"input": "a", "pooling_params": {"dimensions": "8"}}', "'dimensions' is '8'; expected an integer"),
        ('{"input": "a", "pooling_params": {"dimensions": [8, 9]}}', "'dimensions' is [8, 9]; expected"),
        ('{"input": "a", "pooling_params": {"dimensions": true}}', "'dimensions' is True; expected"),
        ('{"input": "a", "pooling_params": {"pooling": "max"}}', "'pooling' is 'max'; allowed: last, mean"),
        ('{"input": "a", "pooling_params": {"pooling": ["last"]}}', "'pooling' is ['last']; allowed"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        embedding_request.parse(text)
    assert words in str(caught.value)


def test_a_client_of_that_backend_may_send_an_empty_text_and_what_only_generation_needs() -> None:
    inputs = {
        "text_input": "",
        "embedding_request": embed(input="hello"),
        "stream": True,
        "sampling_parameters": '{"temperature": 0}',
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    call = codec.parse(
        {name: as_array(value) for name, value in inputs.items()}, '{"octavo_priority": 3, "tenant": "acme"}'
    )
    assert call == codec.Embed(
        "hello",
        PoolingParams(),
        returns=codec.Returns(num_input_tokens=True, num_output_tokens=True),
        priority=3,
        tenant="acme",
    )


@pytest.mark.parametrize("other", [{"text_input": "x"}, {"input_ids": [1]}, {"messages": "[]"}])
def test_a_second_prompt_is_refused(other: dict[str, Any]) -> None:
    inputs = {"embedding_request": embed(input="a"), **other}
    with pytest.raises(InvalidArgument, match=f"has 'embedding_request' and '{next(iter(other))}'"):
        codec.parse({name: as_array(value) for name, value in inputs.items()})


def test_one_final_response_holds_the_vector(llm: LoadedModel) -> None:
    request = llm.ask(
        text_input="",
        embedding_request=embed(input="hello", pooling_params={"pooling": "mean", "dimensions": [2]}),
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_request_stats=True,
        return_logprobs=True,
    )
    ((text,),) = request.sender.texts()
    assert json.loads(text) == [0.6, -0.8]
    (response,) = request.sender.responses
    assert set(response.outputs) == {"text_output", "num_input_tokens", "num_output_tokens", "request_stats"}
    assert response.outputs["num_output_tokens"].tolist() == [0]
    assert response.outputs["num_output_tokens"].dtype == np.uint32
    (seen,) = llm.engine.seen
    assert seen.embed == PoolingParams("mean", 2)
    assert len(seen.prompt_token_ids) == len("hello") + 1  # tokenised as a prompt is


def test_token_ids_are_embedded_as_they_are(llm: LoadedModel) -> None:
    assert len(llm.ask(embedding_request=embed(input=[5, 6, 7])).sender.texts()) == 1
    assert llm.engine.seen[0].prompt_token_ids == (5, 6, 7)
    error = llm.ask(embedding_request=embed(input=[])).sender.error()
    assert error.message == "[INVALID_ARG] the prompt is empty"
