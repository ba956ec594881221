"""A bounded line and bounded time: who is refused, whose time is up, and that every place is given back."""

import json
import threading
import time
from typing import Any

import pytest

from fakes import InferenceRequest, Load, LoadedModel
from octavo.errors import Unavailable
from octavo.serving.waiting_room import WaitingRoom
from waiting import wait_until

ENDLESS = {"max_tokens": 10**6}
LATE_S = 2.0  # by which the end of something may be seen on a busy machine


@pytest.fixture
def small(load: Load) -> LoadedModel:
    """Three may wait for their first step."""
    return load({"model": "m", "max_queue_size": 3}, parameters={"shutdown_timeout_s": {"string_value": "0"}})


def num_waiting(model: LoadedModel) -> int:
    return len(model._model._intake._room)


def assert_refused(request: InferenceRequest) -> None:
    error = request.sender.error()
    assert error.code == "UNAVAILABLE"
    assert error.message == (
        "[UNAVAILABLE] 3 requests wait for their first step already, and max_queue_size is 3; send the "
        "request again later, or to another server"
    )


def test_a_request_too_many_is_refused_at_once_and_the_others_are_served(small: LoadedModel) -> None:
    small.engine.running.clear()
    waiting = [small.ask(text_input="", parameters={"max_tokens": 2}) for _ in range(3)]
    started_s = time.monotonic()
    assert_refused(small.ask(text_input=""))
    assert time.monotonic() - started_s < LATE_S
    small.engine.running.set()
    assert [request.sender.texts() for request in waiting] == [[["ab"]]] * 3
    assert small.ask(text_input="", parameters={"max_tokens": 2}).sender.texts() == [["ab"]]
    assert num_waiting(small) == 0


def test_a_burst_that_is_not_tokenised_yet_counts(small: LoadedModel) -> None:
    small.engine.tokenizer.hold = "x"
    small.execute(*(InferenceRequest(text_input="x", parameters={"max_tokens": 1}) for _ in range(3)))
    assert_refused(small.ask(text_input="y"))
    small.engine.tokenizer.released.set()
    wait_until(lambda: num_waiting(small) == 0)
    assert len(small.engine.seen) == 3


def test_those_that_run_do_not_count(small: LoadedModel) -> None:
    running = []
    for _ in range(8):
        running.append(small.ask(text_input="", stream=True, parameters=ENDLESS))
        wait_until(lambda: num_waiting(small) == 0)
    assert len(small.engine.open) == 8
    assert not any(request.sender.closed.is_set() for request in running)


def test_whoever_ends_without_having_started_gives_the_place_back(small: LoadedModel) -> None:
    def assert_all_end(code: str, *requests: InferenceRequest) -> None:
        assert [request.sender.error().code for request in requests] == [code] * len(requests)
        assert num_waiting(small) == 0

    assert_all_end("INVALID_ARG", *(small.ask(text_input="", parameters={"n": 0}) for _ in range(3)))
    small.engine.running.clear()
    queued = [small.ask("job", text_input="") for _ in range(3)]
    wait_until(lambda: len(small.engine.open) == 3)
    queued[0].sender.cancelled = queued[1].sender.cancelled = True
    assert [request.sender.error().code for request in queued[:2]] == ["CANCELLED"] * 2
    # To ask for the end of another needs no place: the line is full otherwise.
    more = [small.ask(text_input="", parameters={"octavo_deadline_ms": 500}) for _ in range(2)]
    assert_refused(small.ask(text_input=""))
    assert small.ask(cancel_request_id="job").sender.texts() == [[""]]
    queued[2].sender.wait()
    assert_all_end("UNAVAILABLE", *more)
    small.engine.tokenizer.hold = "x"
    tokenising = [small.ask(text_input="x") for _ in range(3)]
    assert small.engine.tokenizer.holding.wait(5)
    for request in tokenising:
        request.sender.cancelled = True
    assert_all_end("CANCELLED", *tokenising)
    small.engine.tokenizer.released.set()


def test_no_more_get_in_than_fit_whoever_comes_at_once() -> None:
    room = WaitingRoom(50)
    refused: list[str] = []
    gate = threading.Barrier(8)

    def enter(thread: int) -> None:
        gate.wait()
        for number in range(100):
            try:
                room.enter(f"{thread} {number}")
            except Unavailable as error:
                refused.append(str(error))

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(room) == 50
    assert len(refused) == 750
    assert all(text.startswith("50 requests wait") for text in refused)


def test_without_a_limit_none_is_refused() -> None:
    room = WaitingRoom(None)
    for number in range(1000):
        room.enter(str(number))
    room.leave("7")
    room.leave("7")
    assert len(room) == 999


def assert_expires(request: InferenceRequest, started_s: float, limit_s: float) -> None:
    error = request.sender.error()
    took_s = time.monotonic() - started_s
    assert limit_s * 0.9 <= took_s < limit_s + LATE_S
    assert error.code == "UNAVAILABLE"
    assert error.message.startswith(
        f"[UNAVAILABLE] the request was not done {limit_s * 1000:.0f} ms after its arrival, which is"
    )


@pytest.mark.parametrize(
    ("parameters", "timeout_us"),
    [
        ({"octavo_deadline_ms": 150}, 0),
        ({"octavo_deadline_ms": "150", "timeout": 0}, 0),
        ({"timeout": 150_000}, 0),
        ({"timeout": "150000", "octavo_deadline_ms": 600_000}, 10**9),
        ({}, 150_000),
        ({"octavo_deadline_ms": 600_000}, 150_000),
        ({"octavo_deadline_ms": 150}, 600_000_000),
    ],
)
def test_a_running_request_ends_at_the_sooner_of_its_deadlines(
    llm: LoadedModel, parameters: dict[str, Any], timeout_us: int
) -> None:
    request = InferenceRequest("", {**ENDLESS, **parameters}, text_input="", stream=True)
    request.timeout_us = timeout_us
    started_s = time.monotonic()
    llm.execute(request)
    assert_expires(request, started_s, 0.15)
    assert llm.engine.open == {}
    assert any(response.error is None for response in request.sender.responses)


def test_time_in_line_counts(llm: LoadedModel) -> None:
    llm.engine.running.clear()
    started_s = time.monotonic()
    requests = [
        llm.ask("", {"octavo_deadline_ms": 100 + 50 * number}, text_input="a") for number in (2, 0, 1)
    ]
    for request, limit_s in zip(requests, (0.2, 0.1, 0.15), strict=True):
        assert_expires(request, started_s, limit_s)
    assert llm.engine.open == {}


def test_time_before_and_while_being_tokenised_counts(llm: LoadedModel) -> None:
    llm.engine.tokenizer.hold = "x"
    started_s = time.monotonic()
    being = llm.ask("", {"octavo_deadline_ms": 100}, text_input="x")
    behind = llm.ask("", {"timeout": 100_000}, text_input="behind")
    assert_expires(being, started_s, 0.1)
    assert_expires(behind, started_s, 0.1)
    llm.engine.tokenizer.released.set()
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]
    assert len(llm.engine.seen) == 1


def test_a_request_that_is_done_in_time_hears_nothing_of_its_deadline(llm: LoadedModel) -> None:
    request = llm.ask("", {"octavo_deadline_ms": 100, "max_tokens": 2}, text_input="")
    unlimited = llm.ask("", {"octavo_deadline_ms": 0, "timeout": 0, **ENDLESS}, text_input="", stream=True)
    assert request.sender.texts() == [["ab"]]
    time.sleep(0.2)
    assert len(request.sender.responses) == 1
    assert not unlimited.sender.closed.is_set()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"octavo_deadline_ms": -1}, "'octavo_deadline_ms' is -1; expected milliseconds, 0 for no limit"),
        ({"octavo_deadline_ms": True}, "'octavo_deadline_ms' is True; expected milliseconds"),
        ({"octavo_deadline_ms": 1.5}, "'octavo_deadline_ms' is 1.5; expected milliseconds"),
        ({"octavo_deadline_ms": 2**63}, "'octavo_deadline_ms' is 9223372036854775808; expected milliseconds"),
        ({"octavo_deadline_ms": None}, "'octavo_deadline_ms' is None; expected milliseconds"),
        ({"timeout": "soon"}, "'timeout' is 'soon'; expected microseconds, 0 for no limit"),
        ({"timeout": "9" * 5000}, "'timeout' is '999"),
    ],
)
def test_a_deadline_that_is_none_is_named(llm: LoadedModel, parameters: dict[str, Any], words: str) -> None:
    error = llm.ask("", parameters, text_input="a").sender.error()
    assert error.code == "INVALID_ARG"
    assert error.message.startswith(f"[INVALID_ARG] {words}")


def test_the_statistics_are_on_the_last_response_alone(llm: LoadedModel) -> None:
    request = llm.ask(
        "", {"max_tokens": 3}, text_input="", stream=True, return_request_stats=True, return_token_ids=True
    )
    request.sender.wait()
    *others, last = request.sender.responses
    assert all("request_stats" not in response.outputs for response in others)
    (text,) = last.outputs["request_stats"]
    assert json.loads(text) == {
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "decode_s": 1.5,
        "cached_prompt_tokens": 4,
        "preemptions": 2,
        "accepted_draft_tokens": 0,
    }
    ids = [token for response in request.sender.responses for token in response.outputs["token_ids"].tolist()]
    assert bytes(ids) == b"abc"


def test_a_tenant_reaches_the_engine(llm: LoadedModel) -> None:
    llm.ask("", {"tenant": "acme", "max_tokens": 1}, text_input="").sender.wait()
    llm.ask("", {"max_tokens": 1}, text_input="").sender.wait()
    assert [request.tenant for request in llm.engine.seen] == ["acme", None]
    error = llm.ask("", {"tenant": ""}, text_input="").sender.error()
    assert error.message == "[INVALID_ARG] 'tenant' must be a string of 1 to 4096 characters; it has 0"
