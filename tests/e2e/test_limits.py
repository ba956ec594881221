"""Bounded queues, time and powers on a real server, statistics of requests, and embeddings."""

import json
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from octavo.serving.launcher import RunningServer
from triton_clients import (
    RUNNING,
    TIMEOUT_S,
    WAITING,
    GrpcStream,
    Metrics,
    generate,
    make_repository,
    post,
    settled,
    wait_for_metric,
    wait_idle,
)

PROMPT = "Tell me a long story."
LATE_S = 2.0  # by which the end of something may be seen on a busy machine; an endless answer takes 7 s
ENDLESS = json.dumps({"max_tokens": 480, "ignore_eos": True})


@pytest.fixture(scope="module")
def narrow(
    start_server: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """One request runs and two may wait, two tokens a step; who manages the server has to know a secret."""
    repository = make_repository(
        tmp_path_factory.mktemp("narrow"),
        backend="octavo",
        max_model_len=512,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        max_queue_size=2,
        fair_scheduling=True,
    )
    protected = "model-repository,logging,trace,shared-memory:admin-key=secret"
    return start_server(
        repository,
        extra_arguments=(f"--http-restricted-api={protected}", f"--grpc-restricted-protocol={protected}"),
    )


def test_only_who_knows_the_secret_manages_the_server(narrow: RunningServer) -> None:
    """As `backend/docs/reliability.md` says: a model that may be loaded from a request is code that runs."""
    for path in ("repository/models/new/load", "repository/index", "logging", "trace/setting"):
        url = f"http://{narrow.http}/v2/{path}"
        body = {"parameters": {"config": "{}", "file:1/model.py": ""}} if path.endswith("load") else {}
        assert httpx.post(url, json=body, timeout=TIMEOUT_S).status_code == 403, path
    index = httpx.post(
        f"http://{narrow.http}/v2/repository/index", headers={"admin-key": "secret"}, timeout=TIMEOUT_S
    )
    assert [model["name"] for model in index.json()] == ["llm"]
    with grpc.InferenceServerClient(narrow.grpc) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model("new", config="{}", files={"file:1/model.py": b""})
        headers = {"triton-grpc-protocol-admin-key": "secret"}
        assert [model.name for model in client.get_model_repository_index(headers).models] == ["llm"]
    assert generate(narrow, text_input="Hello", max_tokens=1)["text_output"]


def test_one_too_many_is_refused_and_a_deadline_ends_those_in_line(narrow: RunningServer) -> None:
    with GrpcStream(narrow) as running, GrpcStream(narrow) as first, GrpcStream(narrow) as second:
        running.send(text_input=PROMPT, stream=True, sampling_parameters=ENDLESS)
        running.next()
        started_s = time.monotonic()
        for stream in (first, second):
            stream.send(
                text_input=PROMPT, sampling_parameters=ENDLESS, parameters={"octavo_deadline_ms": 4000}
            )
        wait_for_metric(narrow, 2, WAITING)
        for kind, expected in (("waiting", 2), ("scheduled", 1)):  # as a load balancer sees it
            wait_for_metric(narrow, expected, "nv_trt_llm_request_metrics", request_type=kind)
        status, answer = post(narrow, "generate", {"text_input": "Hello"})
        assert status == 400
        assert answer["error"].startswith(
            "[UNAVAILABLE] 2 requests wait for their first step already, and max_queue_size is 2"
        )
        for stream in (first, second):
            assert "[UNAVAILABLE] the request was not done 4000 ms after its arrival" in stream.error()
        assert 4 <= time.monotonic() - started_s < 4 + LATE_S
        running.cancel()
    wait_idle(narrow)


def test_a_request_is_cancelled_while_its_prompt_is_computed(narrow: RunningServer) -> None:
    """Which takes some 240 steps of two tokens here."""
    aborted = settled(narrow, "vllm:request_success_total", finished_reason="abort")
    generated = Metrics(narrow).value("vllm:generation_tokens_total")
    with GrpcStream(narrow) as stream:
        stream.send(text_input="story " * 480, stream=True, sampling_parameters=ENDLESS)
        wait_for_metric(narrow, 1, RUNNING)
        stream.cancel()
    wait_for_metric(narrow, aborted + 1, "vllm:request_success_total", finished_reason="abort")
    wait_idle(narrow)
    assert Metrics(narrow).value("vllm:generation_tokens_total") == generated


def test_time_is_up_over_http_while_running_and_its_blocks_are_free(narrow: RunningServer) -> None:
    aborted = settled(narrow, "vllm:request_success_total", finished_reason="abort")
    for limit in ({"timeout": 300_000}, {"octavo_deadline_ms": 300}, {"octavo_deadline_ms": "300"}):
        started_s = time.monotonic()
        status, answer = post(
            narrow, "generate", {"text_input": PROMPT, "sampling_parameters": ENDLESS, **limit}
        )
        assert 0.3 <= time.monotonic() - started_s < 0.3 + LATE_S
        assert status == 400
        assert answer["error"].startswith("[UNAVAILABLE] the request was not done 300 ms after its arrival")
    wait_idle(narrow)
    wait_for_metric(narrow, aborted + 3, "vllm:request_success_total", finished_reason="abort")


def test_triton_s_own_timeout_is_a_deadline_over_grpc(narrow: RunningServer) -> None:
    with GrpcStream(narrow) as stream:
        started_s = time.monotonic()
        stream.send(text_input=PROMPT, stream=True, sampling_parameters=ENDLESS, timeout_us=300_000)
        assert "[UNAVAILABLE] the request was not done 300 ms after its arrival" in stream.error()
        assert 0.3 <= time.monotonic() - started_s < 0.3 + LATE_S
    wait_idle(narrow)


def test_a_request_tells_where_its_time_went(llm: RunningServer) -> None:
    prompt = f"{PROMPT} " * 40
    parameters = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        started_s = time.monotonic()
        answer = generate(llm, text_input=prompt, return_request_stats=True, **parameters)
        took_s = time.monotonic() - started_s
    stats = json.loads(answer["request_stats"])
    assert 0 < stats["queue_s"] + stats["prefill_s"] + stats["decode_s"] < took_s
    assert stats["decode_s"] > 0
    assert stats["cached_prompt_tokens"] >= 200
    assert (stats["preemptions"], stats["accepted_draft_tokens"]) == (0, 0)


def test_another_salt_finds_no_cached_prefix(llm: RunningServer) -> None:
    def cached(salt: str) -> int:
        answer = generate(
            llm,
            text_input="A secret that somebody may want to guess. " * 20,
            cache_salt=salt,
            max_tokens=1,
            return_request_stats=True,
        )
        return int(json.loads(answer["request_stats"])["cached_prompt_tokens"])

    assert cached("one") == 0
    assert cached("one") > 100
    assert cached("two") == 0


def test_embeddings_are_vectors_of_length_one_that_know_what_is_alike(llm: RunningServer) -> None:
    def embed(text: str, **pooling_params: object) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        request = json.dumps({"input": text, "pooling_params": pooling_params})
        return np.array(json.loads(generate(llm, embedding_request=request)["text_output"]))

    cat, kitten, tax = (
        embed(text, pooling="mean")
        for text in ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "The tax form is due.")
    )
    assert cat.shape == (576,)
    assert np.linalg.norm(cat) == pytest.approx(1)
    assert cat @ kitten > cat @ tax
    short = embed("A cat sleeps on the sofa.", pooling="mean", dimensions=[64])
    assert short == pytest.approx(cat[:64] / np.linalg.norm(cat[:64]), abs=1e-5)


def test_an_embedding_over_grpc_is_one_final_response(llm: RunningServer) -> None:
    with GrpcStream(llm) as stream:
        stream.send(text_input="", embedding_request='{"input": [1, 2, 3]}', return_num_input_tokens=True)
        (response,) = [response for response in stream.all() if response.outputs]
        assert response.final
        assert len(json.loads(response.text)) == 576
        assert response.outputs["num_input_tokens"].tolist() == [3]
