"""Responses to typed results, error texts to exceptions, metrics to values, and what the package exports."""

import inspect
import json
import math
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest

import octavo.request
import octavo_client
from octavo.serving import codec, request_parameters
from octavo_client import (
    AlreadyExists,
    Cancelled,
    Delta,
    InternalError,
    InvalidArgument,
    Logprob,
    NotFound,
    OctavoError,
    PermissionDenied,
    Reply,
    RequestStats,
    SamplingParams,
    Unavailable,
    Unsupported,
    _errors,
    _metrics,
)
from octavo_client._base import BaseClient
from octavo_client._replies import Answer


def logprobs(*token_ids: int) -> str:
    return json.dumps([{t: {"logprob": -0.5, "rank": 1, "decoded_token": f"<{t}>"}} for t in token_ids])


def test_two_sequences_are_told_apart() -> None:
    answer = Answer("r")
    first = answer.add(
        Reply(
            {
                "text_output": ["a", ""],
                "finish_reason": ["None", "None"],
                "num_input_tokens": [5],
                "num_output_tokens": [2, 0],
                "token_ids": [1, 2],
                "logprobs": [logprobs(1, 2), "[]"],
                "cumulative_logprob": [-1.0, 0.0],
            }
        )
    )
    entries = tuple((Logprob(t, -0.5, 1, f"<{t}>"),) for t in (1, 2))
    assert first == [Delta("a", 0, 2, (1, 2), entries, -1.0, None)]
    assert not answer.finished
    second = answer.add(
        Reply(
            {
                "text_output": ["", "bc"],
                "finish_reason": ["stop", "length"],
                "num_input_tokens": [5],
                "num_output_tokens": [0, 1],
                "token_ids": [7],
                "logprobs": ["[]", logprobs(7)],
                "cumulative_logprob": [-1.0, -0.25],
                "request_stats": [
                    json.dumps(
                        {
                            "queue_s": 1,
                            "prefill_s": 2,
                            "decode_s": 3,
                            "cached_prompt_tokens": 4,
                            "preemptions": 0,
                            "accepted_draft_tokens": 0,
                        }
                    )
                ],
                "prompt_logprobs": ["[null, " + logprobs(9)[1:]],
            },
            "llm",
            "1",
        )
    )
    assert [(delta.index, delta.finish_reason) for delta in second] == [(0, "stop"), (1, "length")]
    assert answer.finished
    whole = answer.completion()
    assert [choice.text for choice in whole.choices] == ["a", "bc"]
    assert [choice.token_ids for choice in whole.choices] == [(1, 2), (7,)]
    assert whole.usage.total_tokens == 5 + 3
    assert whole.stats == RequestStats(1, 2, 3, 4, 0, 0)
    assert whole.prompt_logprobs == (None, (Logprob(9, -0.5, 1, "<9>"),))
    assert (whole.model, whole.model_version, whole.request_id) == ("llm", "1", "r")


def test_a_finish_reason_is_news_once_and_an_empty_response_none() -> None:
    answer = Answer("r")
    done = Reply({"text_output": ["", ""], "finish_reason": ["stop", "None"], "num_output_tokens": [0, 0]})
    assert [delta.index for delta in answer.add(done)] == [0]
    assert answer.add(done) == []
    assert answer.add(Reply({})) == []


def test_what_was_not_asked_for_is_none() -> None:
    answer = Answer("r")
    (delta,) = answer.add(Reply({"text_output": ["a"]}))
    assert delta == Delta("a")
    assert answer.completion().choices[0].token_ids is None
    (delta,) = answer.add(Reply({"text_output": ["b"], "logprobs": ["null"]}))
    assert delta.logprobs is None


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("[INVALID_ARG] 'n' is 0; allowed: 1 to 128", InvalidArgument, "'n' is 0; allowed: 1 to 128"),
        ("[UNAVAILABLE] 2 requests\nwait", Unavailable, "2 requests\nwait"),
        ("[CANCELLED] the request was cancelled", Cancelled, "the request was cancelled"),
        ("[NOT_FOUND] no adapter", NotFound, "no adapter"),
        ("[INTERNAL] step failed", InternalError, "step failed"),
        ("[UNKNOWN] what", OctavoError, "what"),
        ("[ALREADY_EXISTS] twice", AlreadyExists, "twice"),
        ("[NEW_CODE] what", OctavoError, "[NEW_CODE] what"),
        ("said [INVALID_ARG] later", OctavoError, "said [INVALID_ARG] later"),
        ("Request for unknown model: 'x' is not found", NotFound, None),
        ("Request for unknown model: 'x' has no available versions", Unavailable, None),
        ("unexpected inference input 'x' for model 'llm'", InvalidArgument, None),
        ("This protocol is restricted, expecting header 'admin-key'", PermissionDenied, None),
    ],
)
def test_an_error_text_says_what_it_is(message: str, kind: type[OctavoError], text: str | None) -> None:
    error = _errors.from_message(message)
    assert type(error) is kind
    assert str(error) == (message if text is None else text)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "what is this", InvalidArgument),
        (400, "[UNAVAILABLE] the queue is full", Unavailable),
        (404, "", NotFound),
        (403, "no", PermissionDenied),
        (501, "no", Unsupported),
        (503, "<html>", Unavailable),
        (500, "[INVALID_ARG] but of ours", InvalidArgument),
        (500, "what", InternalError),
        (418, "teapot", InternalError),
    ],
)
def test_a_status_counts_where_the_text_does_not_say(
    status: int, message: str, kind: type[OctavoError]
) -> None:
    error = _errors.from_status(status, message)
    assert type(error) is kind
    assert str(error)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {}
    for line in (_errors.__doc__ or "").splitlines():
        words = line.replace("|", " ").replace("`-", " ").replace("-", " ", 1).split()
        if len(words) >= 2 and hasattr(_errors, words[0]):
            drawn[words[0]] = words[1]
    defined = inspect.getmembers(_errors, lambda it: inspect.isclass(it) and issubclass(it, OctavoError))
    assert drawn == {name: kind.code for name, kind in defined}


def test_prometheus_text() -> None:
    text = (
        "# HELP a:b what\n# TYPE a:b gauge\n"
        'a:b{model="m",path="C:\\\\x \\"q\\"\\n}",le="+Inf"} 1.5e3\n'
        "plain 2 1700000000\nnan NaN\nnot a sample\n"
    )
    first, plain, nan = _metrics.parse(text)
    assert (first.name, first.value) == ("a:b", 1500)
    assert first.labels == {"model": "m", "path": 'C:\\x "q"\n}', "le": "+Inf"}
    assert (plain.name, plain.labels, plain.value) == ("plain", {}, 2)
    assert math.isnan(nan.value)


def test_every_sampling_parameter_of_the_server_has_a_field() -> None:
    ours = {item.name for item in fields(SamplingParams)}
    assert {item.name for item in fields(octavo.request.SamplingParams)} <= ours
    assert ours - {"extra"} <= octavo.request.SAMPLING_NAMES


def test_every_input_and_parameter_that_is_sent_is_one_of_the_server_s() -> None:
    client = BaseClient(model="llm", model_version="", timeout_s=None, retries=None)
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    everything = {
        "priority": 1,
        "deadline_ms": 1,
        "cache_salt": "s",
        "tenant": "t",
        "traceparent": "00",
        "tracestate": "a=b",
        "return_token_ids": True,
        "return_cumulative_logprob": True,
        "return_stats": True,
    }
    request = client._generation("x", params, True, everything)  # type: ignore[arg-type]
    known = {spec.name for spec in codec.INPUTS}
    assert request.inputs.keys() <= known
    assert {name for name in known if name.startswith("return_")} <= request.inputs.keys()
    own, rest = request_parameters.split(json.dumps(dict(request.parameters)))
    assert rest == {}
    assert own.keys() == {"priority", "cache_salt", "tenant", "traceparent", "tracestate"}


def test_all_that_is_public_is_exported() -> None:
    exported = set(octavo_client.__all__)
    assert len(exported) == len(octavo_client.__all__)
    assert all(hasattr(octavo_client, name) for name in exported)
    for part in ("_client", "_async_client", "_errors", "_types", "_many", "_metrics", "_replies"):
        module = import_module(f"octavo_client.{part}")
        public = {
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        internal = {"Answer", "Collector", "ProgressBar"}
        assert public - internal <= exported, part


BASE_INSTALL = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "tokenizers", "gguf", "pytriton", "jinja2", "octavo",
                                      "octavo_kernels", "safetensors", "rich", "triton"}:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocker())
import octavo_client
late = {"httpx", "grpc", "tritonclient", "numpy"} & set(sys.modules)
assert not late, late
for url in ("http://localhost:1", "grpc://localhost:1", "https://localhost:1", "grpcs://localhost:1"):
    with octavo_client.Client(url) as client:
        assert not client.health()
    octavo_client.AsyncClient(url)
"""


def test_a_base_install_is_enough_and_importing_it_is_cheap() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BASE_INSTALL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
