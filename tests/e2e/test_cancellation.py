"""Requests that end early: cancelled while running or queued, by id, or by a client that leaves."""

import http.client
import itertools
import json
import threading
import time

from octavo.serving.launcher import RunningServer
from triton_clients import (
    RUNNING,
    WAITING,
    GrpcStream,
    connect,
    encode,
    events,
    generate,
    post,
    settled,
    wait_for_metric,
    wait_idle,
)

SEATS = 32  # max_num_seqs of the server
PROMPT = "Tell me a long story."


def endless(n: int = 1) -> str:
    return json.dumps({"max_tokens": 480, "ignore_eos": True, "n": n})


def step_time_s(stream: GrpcStream, steps: int = 6) -> float:
    """The longest time between two responses of a stream, of a few."""
    times = [stream.next().at for _ in range(steps)]
    return max(b - a for a, b in itertools.pairwise(times))


def test_cancelling_a_running_request_frees_its_blocks_at_once(llm: RunningServer) -> None:
    with GrpcStream(llm) as running, GrpcStream(llm) as queued:
        running.send(text_input=PROMPT, stream=True, sampling_parameters=endless(SEATS))
        step_s = step_time_s(running)
        queued.send(text_input="Hello", sampling_parameters='{"max_tokens": 1}')
        wait_for_metric(llm, 1, WAITING)
        assert queued.is_silent()
        cancelled_s = time.monotonic()
        running.cancel()
        seated_s = queued.all()[-1].at - cancelled_s
    # 0.2 s, the step in flight, and the step of the request that waited for a seat; the rest is for noise.
    assert seated_s < 0.2 + 2 * step_s + 0.2
    wait_idle(llm)


def test_a_queued_request_is_cancelled_without_ever_running(llm: RunningServer) -> None:
    with GrpcStream(llm) as running, GrpcStream(llm) as queued:
        running.send(text_input=PROMPT, stream=True, sampling_parameters=endless(SEATS))
        running.next()
        queued.send(text_input=PROMPT, stream=True, sampling_parameters=endless())
        wait_for_metric(llm, 1, WAITING)
        queued.cancel()
        wait_for_metric(llm, 0, WAITING)
        wait_for_metric(llm, SEATS, RUNNING)
        running.cancel()
    wait_idle(llm)


def test_a_client_that_leaves_a_stream_over_http_frees_its_blocks(llm: RunningServer) -> None:
    aborted = settled(llm, "vllm:request_success_total", finished_reason="abort")
    connection = connect(llm)
    body = encode({"text_input": PROMPT, "stream": True, "sampling_parameters": endless()})
    connection.request("POST", "/v2/models/llm/generate_stream", body)
    response = connection.getresponse()
    for _ in zip(range(3), events(response), strict=False):
        pass
    wait_for_metric(llm, 1, RUNNING)
    response.close()
    connection.close()
    wait_idle(llm)
    wait_for_metric(llm, aborted + 1, "vllm:request_success_total", finished_reason="abort")


def test_a_request_is_cancelled_by_the_id_its_client_set(llm: RunningServer) -> None:
    answers: list[tuple[int, dict[str, str]]] = []
    body = {"id": "story-1", "text_input": PROMPT, "sampling_parameters": endless()}
    thread = threading.Thread(target=lambda: answers.append(post(llm, "generate", body)))
    thread.start()
    wait_for_metric(llm, 1, RUNNING)
    assert generate(llm, cancel_request_id="story-1")["text_output"] == ""
    thread.join(10)
    ((status, answer),) = answers
    assert answer == {"error": "[CANCELLED] the request was cancelled"}
    assert status == http.client.BAD_REQUEST
    wait_idle(llm)


def test_many_that_leave_at_once_leave_nothing_behind(llm: RunningServer) -> None:
    streams = [GrpcStream(llm) for _ in range(40)]
    for stream in streams:
        stream.send(text_input=PROMPT, stream=True, sampling_parameters=endless())
    # Whichever came first: the server may take any of them to be the first, and eight have no seat. Without
    # this the zeros below may be those of before.
    wait_for_metric(llm, SEATS, RUNNING)
    for stream in streams:
        stream.cancel()
    wait_idle(llm)
    assert generate(llm, text_input="Hello", max_tokens=1)["text_output"].startswith("Hello")
