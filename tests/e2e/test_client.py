"""The client against a real tritonserver: both twins, over both transports, each test four times."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from client_twins import TWINS, MakeClient, twin
from octavo.serving.launcher import RunningServer
from octavo_client import (
    AsyncClient,
    Cancelled,
    ChatMessage,
    Client,
    ConnectionLost,
    InvalidArgument,
    NoAdapters,
    NotFound,
    OctavoError,
    Retries,
    SamplingParams,
    ServerUnreachable,
    TimedOut,
    Unavailable,
)
from triton_clients import RUNNING, WAITING, Metrics, StartServer, make_repository, wait_for_metric, wait_idle

FRANCE = "The capital of France is"
PARIS = " Paris.\n\nThe answer is:"  # eight greedy tokens
STORY = "Tell me a long story."
GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENDLESS = SamplingParams(max_tokens=480, ignore_eos=True)  # some 7 s alone
LATE_S = 2.0  # by which the end of something is seen on a busy machine
ENDED, ABORTED = "vllm:request_success_total", {"finished_reason": "abort"}


def url(server: RunningServer, scheme: str) -> str:
    return f"{scheme}://{server.grpc if scheme == 'grpc' else server.http}"


@pytest.fixture(params=TWINS)
def make(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    with twin(request.param) as make:
        yield make


@pytest.fixture(params=["http", "grpc"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(make: MakeClient, scheme: str, llm: RunningServer) -> Any:
    return make(url(llm, scheme), metrics_url=f"http://{llm.metrics}/metrics")


def test_generate_answers_once_and_stream_in_deltas(client: Any) -> None:
    whole = client.generate(FRANCE, GREEDY, return_token_ids=True, return_stats=True)
    assert (whole.text, whole.finish_reason, whole.model) == (PARIS, "length", "llm")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 8)
    assert whole.stats.decode_s > 0
    with client.stream(FRANCE, GREEDY, return_token_ids=True) as stream:
        deltas = list(stream)
        assert stream.completion.choices == whole.choices
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == PARIS
    assert sum(delta.num_tokens for delta in deltas) == 8
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_every_sequence_has_tokens_and_logprobs_of_its_own(client: Any) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=7, max_tokens=10, ignore_eos=True, logprobs=2)
    options = {"return_token_ids": True, "return_cumulative_logprob": True}
    ids = (504, 3575, 282, 4649, 314)  # of the same text
    whole = client.generate(ids, params, **options)
    assert len({choice.text for choice in whole.choices}) == 3
    for choice in whole.choices:
        tokens = tuple(entries[0].token_id for entries in choice.logprobs)
        assert tokens == choice.token_ids
        assert len(tokens) == choice.num_tokens == 10
        assert "".join(entries[0].decoded_token for entries in choice.logprobs) == choice.text
        total = sum(entries[0].logprob for entries in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(total, rel=1e-4)
    with client.stream(FRANCE, params, **options) as stream:
        for delta in stream:
            assert len(delta.token_ids) == len(delta.logprobs) == delta.num_tokens
        assert [choice.token_ids for choice in stream.completion.choices] == [
            choice.token_ids for choice in whole.choices
        ]


def test_a_chat_streams_too_and_its_answer_goes_on(client: Any) -> None:
    messages = [ChatMessage("user", "What is the capital of France? One word.")]
    params = SamplingParams(temperature=0, max_tokens=12)
    answer = client.chat(messages, params)
    assert "Paris" in answer.text
    with client.stream_chat(messages, params) as stream:
        assert "".join(delta.text for delta in stream) == answer.text
    second = client.chat([*messages, answer.message, {"role": "user", "content": "Say it again."}], params)
    assert second.usage.prompt_tokens > answer.usage.prompt_tokens


def test_embeddings_know_what_is_alike(client: Any) -> None:
    cat, kitten, tax = (
        np.array(client.embed(text, pooling="mean").vector)
        for text in ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "The tax form is due.")
    )
    assert cat @ kitten > cat @ tax
    short = client.embed("A cat sleeps on the sofa.", pooling="mean", dimensions=64)
    assert 4 <= short.usage.prompt_tokens <= 10
    assert short.vector == pytest.approx(cat[:64] / np.linalg.norm(cat[:64]), abs=1e-5)


def test_what_is_wrong_is_typed_and_says_whose_it_is(client: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^'temperature' is -1\.0; allowed: 0 to 100$") as caught:
        client.generate(FRANCE, SamplingParams(temperature=-1), request_id="mine")
    assert caught.value.request_id == "mine"
    with (
        pytest.raises(InvalidArgument, match="did you mean 'max_tokens'"),
        client.stream(FRANCE, SamplingParams(extra={"max_token": 3})) as stream,
    ):
        next(stream)
    with pytest.raises(NotFound, match="adapter 'absent'"):
        client.generate(FRANCE, SamplingParams(lora_name="absent"))
    with pytest.raises(InvalidArgument, match="'role'"):
        client.chat([{"content": "Hello"}])
    with pytest.raises(NoAdapters, match="'mine' cannot be loaded"):
        client.load_adapter("mine", "/adapters/mine")
    with pytest.raises(NoAdapters, match="'mine' cannot be loaded or unloaded"):
        client.unload_adapter("mine")


def test_a_model_that_is_not_there(make: MakeClient, scheme: str, llm: RunningServer) -> None:
    client = make(url(llm, scheme), model="absent")
    with pytest.raises(NotFound, match="unknown model: 'absent'"):
        client.generate(FRANCE)
    with pytest.raises(NotFound), client.stream(FRANCE) as stream:
        next(stream)
    with pytest.raises(NotFound):
        client.model_info()
    health = client.health()
    assert (health.live, health.ready, health.model_ready, bool(health)) == (True, True, False, False)


def test_leaving_a_stream_ends_its_request_at_once(client: Any, llm: RunningServer) -> None:
    aborted = Metrics(llm).value(ENDED, **ABORTED)
    with client.stream(STORY, ENDLESS) as stream:
        for _, _ in zip(range(3), stream, strict=False):
            pass
        left_s = time.monotonic()
    assert time.monotonic() - left_s < LATE_S
    assert "".join(choice.text for choice in stream.completion.choices)
    assert list(stream) == []
    wait_for_metric(llm, aborted + 1, ENDED, **ABORTED)
    wait_idle(llm)


def test_when_time_is_up_the_request_is_ended(client: Any, llm: RunningServer) -> None:
    aborted = Metrics(llm).value(ENDED, **ABORTED)
    started_s = time.monotonic()
    with pytest.raises(TimedOut):
        client.generate(STORY, ENDLESS, timeout_s=0.4)
    with pytest.raises(TimedOut), client.stream(STORY, ENDLESS, timeout_s=0.4) as stream:
        list(stream)
    assert 0.8 <= time.monotonic() - started_s < 0.8 + LATE_S
    # The server's own limit: said once, not tried again.
    with pytest.raises(Unavailable, match="not done 300 ms after its arrival"):
        client.generate(STORY, ENDLESS, deadline_ms=300)
    wait_for_metric(llm, aborted + 3, ENDED, **ABORTED)
    wait_idle(llm)


def test_another_client_cancels_by_the_id(client: Any, llm: RunningServer) -> None:
    aborted = Metrics(llm).value(ENDED, **ABORTED)
    caught: list[OctavoError] = []

    def run() -> None:
        with Client(url(llm, "grpc")) as other, pytest.raises(Cancelled) as info:
            other.generate(STORY, ENDLESS, request_id="story-7")
        caught.append(info.value)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_metric(llm, 1, RUNNING)
    assert client.cancel("story-7") is True
    thread.join(10)
    assert [error.request_id for error in caught] == ["story-7"]
    assert client.cancel("story-7") is False
    wait_for_metric(llm, aborted + 1, ENDED, **ABORTED)
    wait_idle(llm)


def test_many_come_in_order_and_a_failing_one_apart(client: Any) -> None:
    seen: list[tuple[int, int, int]] = []
    results = client.generate_many(
        [FRANCE, [-1], "Once upon a time", FRANCE],
        GREEDY,
        concurrency=3,
        progress=lambda progress: seen.append((progress.done, progress.total, progress.failed)),
    )
    assert [None if done is None else done.text == PARIS for done in results.completions] == [
        True,
        None,
        False,
        True,
    ]
    assert list(results.failures) == [1]
    assert isinstance(results.failures[1], InvalidArgument)
    assert [done for done, _, _ in seen] == [1, 2, 3, 4]
    assert seen[-1] == (4, 4, 1)


def test_what_the_server_says_of_itself(client: Any) -> None:
    assert client.health()
    info = client.model_info()
    assert (info.name, info.versions, info.backend, info.decoupled) == ("llm", ("1",), "octavo", True)
    assert info.takes("messages")
    assert not info.takes("pixels")
    assert {tensor.name: tensor.shape for tensor in info.inputs}["input_ids"] == (-1,)
    metrics = client.metrics()
    assert metrics.value("vllm:generation_tokens_total", model="llm") >= 0
    (running,) = metrics.select(RUNNING)
    assert running.labels["instance"] == "llm_0_0"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_cancelled_task_cancels_its_request(scheme: str, llm: RunningServer) -> None:
    aborted = Metrics(llm).value(ENDED, **ABORTED)

    async def read(client: AsyncClient) -> None:
        async with client.stream(STORY, ENDLESS) as stream:
            async for _ in stream:
                pass

    async def run() -> None:
        async with AsyncClient(url(llm, scheme)) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(client), 0.5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate_many([STORY, STORY], ENDLESS), 0.5)

    asyncio.run(run())
    wait_for_metric(llm, aborted + 3, ENDED, **ABORTED)
    wait_idle(llm)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_many_that_are_interrupted_are_cancelled(scheme: str, llm: RunningServer) -> None:
    aborted = Metrics(llm).value(ENDED, **ABORTED)

    def interrupt(_: object) -> None:
        wait_for_metric(llm, 2, RUNNING)
        raise KeyboardInterrupt

    started_s = time.monotonic()
    with Client(url(llm, scheme)) as client, pytest.raises(KeyboardInterrupt):
        client.generate_many(
            [STORY, STORY, "Hello"], [ENDLESS, ENDLESS, SamplingParams(max_tokens=1)], progress=interrupt
        )
    assert time.monotonic() - started_s < 3 + LATE_S
    wait_for_metric(llm, aborted + 2, ENDED, **ABORTED)
    wait_idle(llm)


@pytest.fixture(scope="module")
def narrow(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """One request runs and one may wait. The last test here ends it."""
    repository = make_repository(
        tmp_path_factory.mktemp("narrow"),
        backend="octavo",
        max_model_len=512,
        max_num_seqs=1,
        max_queue_size=1,
    )
    return start_server(repository)


def test_a_full_queue_is_unavailable_or_waited_for(
    make: MakeClient, scheme: str, narrow: RunningServer
) -> None:
    one_try = make(url(narrow, scheme), retries=Retries(attempts=1))
    patient = make(url(narrow, scheme), retries=Retries(attempts=40, first_pause_s=0.2, max_pause_s=0.2))
    with Client(url(narrow, "grpc")) as other, other.stream(STORY, ENDLESS) as running:
        next(running)
        waiting = threading.Thread(target=other.generate, args=("Hello", SamplingParams(max_tokens=1)))
        waiting.start()
        wait_for_metric(narrow, 1, WAITING)
        with pytest.raises(Unavailable, match=r"^1 requests wait"):
            one_try.generate("Hello")
        threading.Timer(0.5, other.cancel, (running.request_id,)).start()
        assert patient.generate(FRANCE, GREEDY).text.startswith(" Paris.")
        with pytest.raises(Cancelled):
            list(running)
        waiting.join(10)
    wait_idle(narrow)


def test_a_queued_request_whose_client_leaves_never_runs(
    make: MakeClient, scheme: str, narrow: RunningServer
) -> None:
    """Over HTTP as well, where Triton itself would not see it."""
    with Client(url(narrow, "grpc")) as other, other.stream(STORY, ENDLESS) as running:
        next(running)
        with pytest.raises(TimedOut):
            make(url(narrow, scheme)).generate(STORY * 20, timeout_s=0.3)
        wait_for_metric(narrow, 0, WAITING)
        wait_for_metric(narrow, 1, RUNNING)
        assert running.completion.finish_reason is None
        next(running)
    wait_idle(narrow)


def test_a_server_that_goes_away(narrow: RunningServer) -> None:
    streams = []
    clients = [Client(url(narrow, scheme)) for scheme in ("http", "grpc")]
    for client in clients:
        streams.append(client.stream(STORY, ENDLESS))
    next(streams[0])
    killer = threading.Timer(0.3, narrow.stop, (lambda: True,))
    killer.start()
    for stream in streams:
        with stream, pytest.raises((ConnectionLost, Unavailable)):
            list(stream)
    killer.join()
    for client in clients:
        with pytest.raises(ServerUnreachable):
            client.generate(FRANCE)
        assert not client.health().live
        client.close()
