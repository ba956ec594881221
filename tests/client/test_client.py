"""What both twins make of answers, failures and time, on a transport that is a function."""

import inspect
import io
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from client_twins import TWINS, MakeClient, twin
from octavo_client import (
    AsyncClient,
    AsyncStream,
    ChatMessage,
    Client,
    Delta,
    InternalError,
    InvalidArgument,
    MockTransport,
    NotFound,
    Progress,
    ProtocolError,
    Reply,
    Retries,
    SamplingParams,
    Stream,
    TimedOut,
    Unavailable,
    WireRequest,
)
from octavo_client._base import Attempts, Deadline
from octavo_client._many import ProgressBar

EAGER = Retries(attempts=3, first_pause_s=0, max_pause_s=0)


@pytest.fixture(params=TWINS)
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with twin(request.param) as make:
        yield make


def echo(request: WireRequest) -> list[str]:
    return str(request.prompt).split(" ")


def names(kind: type) -> dict[str, list[str]]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in methods
        if not name.startswith("_") or name == "__init__"
    }


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_twins_have_the_same_methods_with_the_same_parameters(one: type, other: type) -> None:
    assert names(one) == names(other)


def test_a_request_is_the_contract_s(make: MakeClient) -> None:
    mock = MockTransport(echo)
    client = make(transport=mock, model="m", model_version="3")
    client.generate(
        "a b",
        SamplingParams(max_tokens=4, stop=("x", "y"), logprobs=0, extra={"new": 1}),
        request_id="r",
        priority=-1,
        deadline_ms=500,
        tenant="t",
        return_stats=True,
    )
    (request,) = mock.requests
    assert (request.model, request.version, request.request_id, request.streams) == ("m", "3", "r", False)
    assert request.parameters == {"octavo_priority": -1, "octavo_deadline_ms": 500, "tenant": "t"}
    assert request.sampling == {"max_tokens": 4, "stop": ["x", "y"], "logprobs": 0, "new": 1}
    assert request.inputs == {
        "text_input": "a b",
        "stream": False,
        "sampling_parameters": request.inputs["sampling_parameters"],
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": True,
        "return_request_stats": True,
    }


def test_ids_chats_and_embeddings_as_they_are_sent(make: MakeClient) -> None:
    mock = MockTransport(lambda request: "[0.6, 0.8]" if "embedding_request" in request.inputs else "hi")
    client = make(transport=mock)
    client.generate([1, 2])
    client.chat([ChatMessage("user", "Hello"), {"role": "tool", "content": "4", "name": "add"}])
    vector = client.embed([7, 8], pooling="mean", dimensions=2).vector
    assert vector == (0.6, 0.8)
    ids, chat, embedding = mock.requests
    assert ids.inputs["input_ids"] == (1, 2)
    assert chat.prompt == [
        {"role": "user", "content": "Hello"},
        {"role": "tool", "content": "4", "name": "add"},
    ]
    assert json.loads(str(embedding.inputs["embedding_request"])) == {
        "input": [7, 8],
        "pooling_params": {"pooling": "mean", "dimensions": 2},
    }
    assert len({request.request_id for request in mock.requests}) == 3


def test_an_unknown_option_is_a_type_error(make: MakeClient) -> None:
    client = make(transport=MockTransport(echo))
    with pytest.raises(TypeError, match="temperature"):
        client.generate("a", temperature=1)


def test_deltas_add_up_and_the_last_one_says_why(make: MakeClient) -> None:
    client = make(transport=MockTransport(echo))
    with client.stream("one two three") as stream:
        assert list(stream) == [
            Delta("one", num_tokens=1),
            Delta("two", num_tokens=1),
            Delta("three", num_tokens=1, finish_reason="stop"),
        ]
        assert stream.completion.text == "onetwothree"
        assert stream.completion.usage.completion_tokens == 3
    whole = client.generate("one two three", request_id="r")
    assert (whole.text, whole.finish_reason, whole.request_id) == ("onetwothree", "stop", "r")
    assert whole.usage == stream.completion.usage
    assert whole.message == ChatMessage("assistant", "onetwothree")


def test_leaving_tells_the_transport_and_reading_to_the_end_does_not(make: MakeClient) -> None:
    mock = MockTransport(echo)
    client = make(transport=mock)
    with client.stream("one two three", request_id="left") as stream:
        next(stream)
    assert mock.left == ["left"]
    assert list(stream) == []
    with client.stream("one two", request_id="read") as stream:
        list(stream)
    with client.stream("one two", request_id="read but for the end") as stream:
        next(stream), next(stream)
    with client.stream("never asked"):
        pass
    with pytest.raises(ZeroDivisionError), client.stream("one two", request_id="failed") as stream:
        next(stream), 1 / 0
    assert mock.left == ["left", "failed"]
    assert len(mock.requests) == 4


class Failing:
    """Raises the failures given, one for each request, then echoes."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def __call__(self, request: WireRequest) -> list[str]:
        if self.failures:
            raise self.failures.pop(0)
        return echo(request)


def test_what_may_be_tried_again_is_before_the_first_token(make: MakeClient) -> None:
    mock = MockTransport(Failing(Unavailable("full"), Unavailable("full")))
    client = make(transport=mock, retries=EAGER)
    assert client.generate("a b", request_id="r").text == "ab"
    assert [request.request_id for request in mock.requests] == ["r"] * 3
    with client.stream("a b") as stream:
        assert "".join(delta.text for delta in stream) == "ab"


@pytest.mark.parametrize(
    ("failures", "raised", "tries"),
    [
        ([Unavailable("1"), Unavailable("2"), Unavailable("3")], "3", 3),
        ([InvalidArgument("wrong")], "wrong", 1),
        ([InternalError("broken")], "broken", 1),
        ([TimedOut("late")], "late", 1),
        ([Unavailable("1"), NotFound("gone")], "gone", 2),
    ],
)
def test_what_is_not_tried_again(
    make: MakeClient, failures: list[Exception], raised: str, tries: int
) -> None:
    mock = MockTransport(Failing(*failures))
    client = make(transport=mock, retries=EAGER)
    with pytest.raises(type(failures[-1]), match=raised) as caught:
        client.generate("a", request_id="r")
    assert caught.value.request_id == "r"
    assert len(mock.requests) == tries


def test_after_a_token_nothing_is_tried_again_and_what_came_is_kept(make: MakeClient) -> None:
    def break_off(request: WireRequest) -> Iterator[str]:
        del request
        yield "one"
        raise Unavailable("unloaded")

    mock = MockTransport(break_off)
    client = make(transport=mock, retries=EAGER)
    with client.stream("x") as stream:
        assert next(stream).text == "one"
        with pytest.raises(Unavailable):
            next(stream)
        assert stream.completion.text == "one"
        assert stream.completion.finish_reason is None
    assert len(mock.requests) == 1


def test_no_try_is_made_after_the_time_is_up(make: MakeClient) -> None:
    slow = Retries(attempts=100, first_pause_s=0.05, max_pause_s=0.05)
    mock = MockTransport(Failing(*[Unavailable("full")] * 1000))
    client = make(transport=mock, retries=slow, timeout_s=0.3)
    started_s = time.monotonic()
    with pytest.raises(Unavailable):
        client.generate("a")
    assert time.monotonic() - started_s < 2
    with pytest.raises(Unavailable):
        client.generate("a", timeout_s=None, deadline_ms=100)
    assert 2 <= len(mock.requests) < 100


def test_pauses_are_random_and_grow_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    attempts = Attempts(Retries(attempts=6, first_pause_s=0.1, max_pause_s=0.5), Deadline(None))
    pauses = [attempts.pause_s(Unavailable("full"), answered=False) for _ in range(6)]
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, None]


def test_an_answer_that_is_none(make: MakeClient) -> None:
    client = make(transport=MockTransport(lambda request: []))
    with pytest.raises(ProtocolError, match="without an answer"):
        client.generate("a")
    wrong = Reply({"text_output": ["a"], "num_output_tokens": [2], "token_ids": [1]})
    client = make(transport=MockTransport(lambda request: [wrong]))
    with pytest.raises(ProtocolError, match="fewer than num_output_tokens"):
        client.generate("a")
    client = make(transport=MockTransport(lambda request: ["a"]))
    with pytest.raises(ProtocolError, match="no vector"):
        client.embed("a")


def test_many_are_in_order_with_their_own_parameters(make: MakeClient) -> None:
    def answer(request: WireRequest) -> str:
        if request.prompt == "bad":
            raise InvalidArgument("bad")
        return f"{request.prompt}{request.sampling['max_tokens']}"

    mock = MockTransport(answer)
    client = make(transport=mock)
    params = [SamplingParams(max_tokens=i) for i in range(1, 5)]
    results = client.generate_many(["a", "bad", "c", "d"], params, concurrency=2)
    assert [None if done is None else done.text for done in results.completions] == ["a1", None, "c3", "d4"]
    assert [type(result).__name__ for result in results] == [
        "Completion",
        "InvalidArgument",
        "Completion",
        "Completion",
    ]
    with pytest.raises(ExceptionGroup, match="1 of 4 requests failed"):
        results.all()
    assert client.generate_many([]).all() == []
    with pytest.raises(ValueError, match="3 prompts and 4 sampling parameters"):
        client.generate_many(["a", "b", "c"], params)
    with pytest.raises(ValueError, match="request_id"):
        client.generate_many(["a", "b"], request_id="r")
    with pytest.raises(ValueError, match="concurrency"):
        client.generate_many(["a"], concurrency=0)


def test_many_may_be_texts_ids_and_chats(make: MakeClient) -> None:
    def answer(request: WireRequest) -> str:
        if request.prompt == [{"role": "user", "content": "bad"}]:
            raise InvalidArgument("bad")
        return str(request.prompt)

    mock = MockTransport(answer)
    chat = [ChatMessage("system", "Be brief."), {"role": "user", "content": "Hi"}]
    items = ["a", [1, 2], chat, (ChatMessage("user", "bad"),), "b"]
    results = make(transport=mock).generate_many(items, concurrency=3)
    assert [None if done is None else done.text for done in results.completions] == [
        "a",
        "(1, 2)",
        "[{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]",
        None,
        "b",
    ]
    assert {index: str(error) for index, error in results.failures.items()} == {3: "bad"}


def test_a_progress_that_raises_ends_it_all(make: MakeClient) -> None:
    def stop(progress: Progress) -> None:
        raise RuntimeError(f"after {progress.done}")

    client = make(transport=MockTransport(echo))
    with pytest.raises((RuntimeError, ExceptionGroup)):
        client.generate_many(["a"] * 5, SamplingParams(max_tokens=1), progress=stop)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_draws_one_line() -> None:
    states = [Progress(1, 4, 0, 10, 1.0), Progress(2, 4, 0, 20, 1.01), Progress(4, 4, 1, 40, 2.0)]
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        bar = ProgressBar(out)
        for state in states:
            bar(state)
    first = "\r\033[K[######                  ] 1/4, 10 tokens/s"
    last = "[########################] 4/4, 20 tokens/s, 1 failed\n"
    assert terminal.getvalue() == f"{first}\r\033[K{last}"
    assert file.getvalue() == last


METADATA = {
    "name": "m",
    "versions": ["1", "2"],
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": ["1"]}],  # gRPC's JSON has them as texts
    "outputs": [],
}


def test_health_metrics_and_the_model(make: MakeClient) -> None:
    client = make(
        transport=MockTransport(
            echo,
            ready=False,
            metadata=METADATA,
            config={"backend": "octavo", "model_transaction_policy": {"decoupled": True}},
            metrics='a{model="m"} 2\na{model="n"} 3\n',
        )
    )
    assert not client.health()
    info = client.model_info()
    assert (info.versions, info.backend, info.decoupled, info.inputs[0].shape) == (
        ("1", "2"),
        "octavo",
        True,
        (1,),
    )
    assert client.metrics().value("a", model="n") == 3
    assert client.metrics().value("a") == 5
    with pytest.raises(KeyError, match="no metric b"):
        client.metrics().value("b")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a/v2", "http://a:b"])
def test_a_url_of_another_kind(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError):
            kind(url)


def test_a_header_that_kills_servers_is_refused() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="triton_grpc_error"):
            kind("grpc://localhost:1", headers={"Triton_grpc_error": "true"})


def consume(deltas: Any) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_generator_may_answer_what_it_was_asked(make: MakeClient) -> None:
    def answer(request: WireRequest) -> Iterator[str]:
        for i in range(request.sampling["max_tokens"]):
            yield f"{i} "

    client = make(transport=MockTransport(answer))
    with client.stream("count", SamplingParams(max_tokens=3)) as stream:
        assert consume(stream) == "0 1 2 "


def test_what_a_template_is_to_know_goes_beside_the_messages(make: MakeClient) -> None:
    mock = MockTransport(lambda _: "hi")
    tool = {"type": "function", "function": {"name": "add"}}
    make(transport=mock).chat(
        [ChatMessage("user", "Hello")],
        tools=(tool,),
        chat_template_kwargs={"enable_thinking": False},
        tenant="t",
    )
    (request,) = mock.requests
    assert json.loads(str(request.inputs["messages"])) == {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert request.prompt == [{"role": "user", "content": "Hello"}]
    assert request.parameters == {"tenant": "t"}


def test_the_prompt_s_text_can_be_asked_for(make: MakeClient) -> None:
    mock = MockTransport(lambda _: "hi")
    make(transport=mock).generate("a", echo=True)
    assert mock.requests[0].inputs["exclude_input_in_output"] is False


def test_the_models_of_a_server(make: MakeClient) -> None:
    loading = {"name": "big", "version": "2", "state": "LOADING", "reason": "loading"}
    mock = MockTransport(lambda _: "hi", models=[{"name": "llm", "state": "READY"}, loading])
    client = make(transport=mock)
    llm, big = client.models()
    assert (llm.name, llm.ready) == ("llm", True)
    assert (big.name, big.version, big.ready, big.reason) == ("big", "2", False, "loading")


def test_next_deltas_takes_all_that_came_together(make: MakeClient) -> None:
    def two(_: WireRequest) -> list[Reply]:
        outputs = {"text_output": ["a", "b"], "num_output_tokens": [1, 1]}
        return [
            Reply({**outputs, "finish_reason": ["None", "None"]}),
            Reply({**outputs, "finish_reason": ["stop", "stop"]}),
        ]

    with make(transport=MockTransport(two)).stream("x", SamplingParams(n=2)) as stream:
        assert [delta.text for delta in stream.next_deltas()] == ["a", "b"]
        assert [delta.finish_reason for delta in stream.next_deltas()] == ["stop", "stop"]
        assert stream.next_deltas() == []
