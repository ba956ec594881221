"""What clients get from a real tritonserver: over HTTP, over server-sent events, over gRPC streams."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from octavo.serving import codec
from octavo.serving.launcher import RunningServer
from triton_clients import GrpcStream, Response, generate, generate_stream, get, post

FRANCE = "The capital of France is"
PARIS = " Paris.\n\nThe answer is:"  # eight greedy tokens
GREEDY = '{"temperature": 0, "max_tokens": 8}'
EVERYTHING = {f"return_{name}": True for name in codec.Returns.__dataclass_fields__}


def greedy(**more: Any) -> str:
    return json.dumps({"temperature": 0, "max_tokens": 8, **more})


def test_the_projects_own_repository_is_served(server: RunningServer) -> None:
    answer = generate(server, text_input=FRANCE, sampling_parameters=greedy(max_tokens=2))
    assert answer["text_output"] == FRANCE + " Paris."
    assert get(server, "/v2/models/llm/config")[1].count('"backend":"python"') == 1


def test_a_repository_that_names_the_backend_needs_no_model_py(llm: RunningServer) -> None:
    assert not list(Path(llm.options.repository).rglob("model.py"))
    assert generate(llm, text_input=FRANCE, sampling_parameters=GREEDY)["text_output"] == FRANCE + PARIS


def test_health_and_metadata(llm: RunningServer) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/llm/ready"):
        assert get(llm, path)[0] == 200
    metadata = json.loads(get(llm, "/v2/models/llm")[1])
    assert {entry["name"] for entry in metadata["inputs"]} == {spec.name for spec in codec.INPUTS}
    assert {entry["name"] for entry in metadata["outputs"]} == {spec.name for spec in codec.OUTPUTS}


def test_http_streams_deltas_that_add_up_to_the_answer(llm: RunningServer) -> None:
    parts = generate_stream(llm, text_input=FRANCE, stream=True, sampling_parameters=GREEDY)
    assert len(parts) > 1
    assert "".join(part["text_output"] for part in parts) == PARIS
    assert set(parts[0]) == {"model_name", "model_version", "text_output"}


def test_grpc_streams_deltas_and_marks_the_last_one(llm: RunningServer) -> None:
    with GrpcStream(llm) as stream:
        parts = stream.send("job-1", text_input=FRANCE, stream=True, sampling_parameters=GREEDY).all()
        assert "".join(part.text for part in parts) == PARIS
        assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(set(part.outputs) == {"text_output"} for part in parts)
        # Without streaming there is one response, and it is the final one.
        (only,) = stream.send(text_input=FRANCE, sampling_parameters=GREEDY).all()
        assert (only.text, only.final) == (FRANCE + PARIS, True)


def test_request_parameters_stand_in_for_sampling_parameters(llm: RunningServer) -> None:
    answer = generate(llm, text_input=FRANCE, temperature="0", max_tokens=8, exclude_input_in_output=True)
    assert answer["text_output"] == PARIS
    with GrpcStream(llm) as stream:
        stream.send("", {"temperature": "0", "max_tokens": 8, "octavo_priority": -1}, text_input=FRANCE)
        assert stream.result() == FRANCE + PARIS


def test_sixteen_tokens_are_the_default(llm: RunningServer) -> None:
    answer = generate(llm, text_input=FRANCE, ignore_eos=True, return_num_output_tokens=True)
    assert answer["num_output_tokens"] == 16


def test_ids_and_text_are_the_same_prompt(llm: RunningServer) -> None:
    ids = generate(llm, input_ids=[504, 3575, 282, 4649, 314], sampling_parameters=GREEDY)
    assert ids["text_output"] == FRANCE + PARIS


def test_a_chat_goes_through_the_models_own_template(llm: RunningServer) -> None:
    messages = json.dumps([{"role": "user", "content": "What is the capital of France? One word."}])
    answer = generate(
        llm, messages=messages, exclude_input_in_output=True, sampling_parameters=greedy(max_tokens=12)
    )
    assert "Paris" in answer["text_output"]
    echoed = generate(llm, messages=messages, sampling_parameters=greedy(max_tokens=12))
    assert echoed["text_output"].endswith("<|im_start|>assistant\n" + answer["text_output"])


def test_every_optional_output_agrees_with_every_other(llm: RunningServer) -> None:
    inputs = {"text_input": FRANCE, "sampling_parameters": greedy(logprobs=2), **EVERYTHING}
    with GrpcStream(llm) as stream:
        parts = stream.send(stream=True, **inputs).all()
        (whole,) = stream.send(exclude_input_in_output=True, **inputs).all()
    assert set(whole.outputs) == {spec.name for spec in codec.OUTPUTS}
    assert whole.outputs["finish_reason"].tolist() == [b"length"]
    assert whole.outputs["num_input_tokens"].tolist() == [5]
    assert whole.outputs["num_output_tokens"].tolist() == [8]
    tokens = whole.outputs["token_ids"].tolist()
    logprobs = json.loads(whole.outputs["logprobs"][0])
    assert [int(next(iter(entry))) for entry in logprobs] == tokens
    assert all(2 <= len(entry) <= 3 and min(e["rank"] for e in entry.values()) == 1 for entry in logprobs)
    assert "".join(next(iter(entry.values()))["decoded_token"] for entry in logprobs) == whole.text == PARIS
    total = sum(next(iter(entry.values()))["logprob"] for entry in logprobs)
    assert whole.outputs["cumulative_logprob"][0] == pytest.approx(total, rel=1e-5)
    # The stream says the same in pieces: totals where totals are due, deltas everywhere else.
    assert [part.outputs["finish_reason"][0] for part in parts] == [b"None"] * (len(parts) - 1) + [b"length"]
    assert all(part.outputs["num_input_tokens"].tolist() == [5] for part in parts)
    assert sum(part.outputs["num_output_tokens"][0] for part in parts) == 8
    assert [token for part in parts for token in part.outputs["token_ids"]] == tokens
    assert [len(json.loads(part.outputs["logprobs"][0])) for part in parts] == [
        part.outputs["num_output_tokens"][0] for part in parts
    ]
    running = [part.outputs["cumulative_logprob"][0] for part in parts]
    assert running == sorted(running, reverse=True)
    assert running[-1] == pytest.approx(total, rel=1e-4)


def test_logprobs_are_null_when_the_sampling_parameter_is_unset(llm: RunningServer) -> None:
    answer = generate(llm, text_input=FRANCE, max_tokens=2, return_logprobs=True, return_finish_reason=False)
    assert answer["logprobs"] == "null"
    assert "finish_reason" not in answer


def test_parallel_samples_arrive_whole_streaming_or_not(llm: RunningServer) -> None:
    sampling = json.dumps({"n": 3, "temperature": 1.2, "seed": 7, "max_tokens": 10, "ignore_eos": True})
    inputs = {"text_input": FRANCE, "sampling_parameters": sampling, **EVERYTHING}
    whole = generate(llm, exclude_input_in_output=True, **inputs)
    texts = whole["text_output"]
    assert len(set(texts)) == 3
    assert whole["num_output_tokens"] == [10, 10, 10]
    assert whole["finish_reason"] == ["length"] * 3
    with GrpcStream(llm) as stream:
        parts = stream.send(stream=True, **inputs).all()
    assert all(len(part.outputs["text_output"]) == 3 for part in parts)
    joined = ["".join(part.outputs["text_output"][i].decode() for part in parts) for i in range(3)]
    assert joined == texts
    assert np.sum([part.outputs["num_output_tokens"] for part in parts], axis=0).tolist() == [10, 10, 10]
    assert parts[-1].outputs["finish_reason"].tolist() == [b"length"] * 3
    assert split(parts) == np.array(whole["token_ids"]).reshape(3, 10).tolist()


def split(parts: list[Response]) -> list[list[int]]:
    """The tokens of each of three sequences, taken apart by num_output_tokens."""
    sequences: list[list[int]] = [[], [], []]
    for part in parts:
        ends = np.cumsum(part.outputs["num_output_tokens"])[:-1]
        for sequence, tokens in zip(sequences, np.split(part.outputs["token_ids"], ends), strict=True):
            sequence.extend(tokens.tolist())
    return sequences


def test_a_stop_string_ends_the_text_before_it(llm: RunningServer) -> None:
    answer = generate(
        llm, text_input=FRANCE, sampling_parameters=greedy(stop=["answer"]), return_finish_reason=True
    )
    assert answer["text_output"] == FRANCE + " Paris.\n\nThe "
    assert answer["finish_reason"] == "stop"


PROMPTS = [
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):",
    "In 1969, people first",
    "Water boils at",
    "My favourite book is",
    "The three primary colours are",
    "To bake bread you need flour, water,",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Seven times eight is",
    "The largest planet is",
    "A haiku about rain:",
    "import numpy as",
    "Shakespeare wrote",
    "The sun rises in the",
]


def test_parameters_that_edit_logits_and_ask_about_the_prompt(llm: RunningServer) -> None:
    inputs = {"text_input": FRANCE, "exclude_input_in_output": True, "return_prompt_logprobs": True}
    answer = generate(llm, **inputs, sampling_parameters=greedy(bad_words=["Paris"], prompt_logprobs=1))
    assert "Paris" not in answer["text_output"]
    first, *others = json.loads(answer["prompt_logprobs"])
    assert first is None
    assert "".join(next(iter(entry.values()))["decoded_token"] for entry in others) == " capital of France is"
    assert all(1 <= len(entry) <= 2 and min(e["rank"] for e in entry.values()) == 1 for entry in others)
    hot = {"temperature": 1, "seed": 3}
    every = generate(llm, **inputs, sampling_parameters=greedy(**hot, n=4), return_cumulative_logprob=True)
    best = generate(llm, **inputs, sampling_parameters=greedy(**hot, best_of=4))
    assert best["text_output"] == every["text_output"][np.argmax(every["cumulative_logprob"])]
    assert best["prompt_logprobs"] == "null"


def test_32_concurrent_streams_are_each_what_they_are_alone(llm: RunningServer) -> None:
    sampling = greedy(max_tokens=12, logprobs=2)
    inputs = {"sampling_parameters": sampling, "return_token_ids": True, "return_logprobs": True}
    with GrpcStream(llm) as stream:
        alone = [stream.send(text_input=prompt, **inputs).all()[0] for prompt in PROMPTS]
    streams = [GrpcStream(llm) for _ in range(32)]
    for i, stream in enumerate(streams):
        stream.send(f"stream-{i}", text_input=PROMPTS[i % 16], stream=True, **inputs)
    ties = 0
    for i, stream in enumerate(streams):
        with stream:
            parts = stream.all()
        tokens = [int(token) for part in parts for token in part.outputs["token_ids"]]
        expected = alone[i % 16]
        if tokens != expected.outputs["token_ids"].tolist():
            ties += 1
            assert is_tie(expected, tokens), PROMPTS[i % 16]
        else:
            assert PROMPTS[i % 16] + "".join(part.text for part in parts) == expected.text
    assert ties <= 1


def is_tie(expected: Response, tokens: list[int]) -> bool:
    """Whether the first difference is at a position whose two best logits are as good as equal."""
    wanted = expected.outputs["token_ids"].tolist()
    position = next(i for i, (a, b) in enumerate(zip(wanted, tokens, strict=True)) if a != b)
    entry = json.loads(expected.outputs["logprobs"][0])[position]
    best = sorted((e["logprob"] for e in entry.values()), reverse=True)
    return bool(best[0] - best[1] < 1e-3)


def test_client_set_ids_may_repeat(llm: RunningServer) -> None:
    with GrpcStream(llm) as first, GrpcStream(llm) as second:
        first.send("same", text_input=FRANCE, sampling_parameters=GREEDY)
        second.send("same", text_input="Water boils at", sampling_parameters=GREEDY)
        assert first.result() == FRANCE + PARIS
        assert second.result().startswith("Water boils at")


def test_a_decoupled_model_is_refused_where_there_is_one_answer_only(llm: RunningServer) -> None:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [FRANCE]}
    status, answer = post(llm, "infer", {"inputs": [tensor]})
    assert status == 501
    assert answer == {"error": "HTTP end point doesn't support models with decoupled transaction policy"}
    client = grpc.InferenceServerClient(llm.grpc)
    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([FRANCE.encode()], np.object_))
    with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as error:
        client.infer("llm", [text])
    assert error.value.status() == "StatusCode.UNIMPLEMENTED"
    client.close()
