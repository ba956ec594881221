"""Prompts whose beginning lies on a disk: nobody else waits for it, and each of them is answered."""

import pytest

from fakes import InferenceRequest, Load, LoadedModel
from waiting import wait_until

PARAMETERS = {"max_tokens": 2}


@pytest.fixture
def llm(load: Load) -> LoadedModel:
    model = load(
        {"model": "m", "max_queue_size": 3}, parameters={"shutdown_timeout_s": {"string_value": "0"}}
    )
    model.engine.on_disk = ord("@")
    return model


def ask(model: LoadedModel, text: str) -> InferenceRequest:
    return model.ask(text_input=text, parameters=PARAMETERS)


def test_others_go_ahead_while_a_disk_is_read(llm: LoadedModel) -> None:
    stored = ask(llm, "@")
    assert llm.engine.reading.wait(5)
    assert ask(llm, "x").sender.texts() == [["xab"]]
    assert not stored.sender.closed.is_set()
    llm.engine.read.set()
    assert stored.sender.texts() == [["@ab"]]
    assert [request.stored for request in llm.engine.seen] == [{}, {b"": "content"}]


def test_who_waits_for_a_disk_waits_for_its_first_step(llm: LoadedModel) -> None:
    requests = [ask(llm, "@") for _ in range(3)]
    assert ask(llm, "x").sender.error().code == "UNAVAILABLE"
    llm.engine.read.set()
    assert [request.sender.texts() for request in requests] == [[["@ab"]]] * 3
    wait_until(lambda: len(llm._model._intake._room) == 0)


def test_one_that_is_cancelled_meanwhile_never_comes_to_the_engine(llm: LoadedModel) -> None:
    request = llm.ask(id="r", text_input="@", parameters=PARAMETERS)
    assert llm.engine.reading.wait(5)
    llm.ask(cancel_request_id="r").sender.wait()
    assert request.sender.error().code == "CANCELLED"
    llm.engine.read.set()
    assert ask(llm, "@").sender.texts() == [["@ab"]]
    assert len(llm.engine.seen) == 1


def test_a_deadline_holds_while_a_disk_is_read(llm: LoadedModel) -> None:
    request = llm.ask(text_input="@", parameters={**PARAMETERS, "octavo_deadline_ms": 50})
    assert request.sender.error().code == "UNAVAILABLE"
    llm.engine.read.set()


def test_a_disk_that_fails_in_a_way_that_nobody_foresaw_ends_its_own_request(llm: LoadedModel) -> None:
    def read_stored(request: object) -> None:
        raise ZeroDivisionError("a bug")

    llm.engine.read_stored = read_stored  # type: ignore[method-assign]
    assert "a bug" in ask(llm, "@").sender.error().message
    assert ask(llm, "x").sender.texts() == [["xab"]]


def test_those_that_wait_for_a_disk_are_answered_when_the_server_shuts_down(llm: LoadedModel) -> None:
    requests = [ask(llm, "@") for _ in range(3)]
    assert llm.engine.reading.wait(5)
    llm._model._drain()
    llm.engine.read.set()
    assert [request.sender.error().code for request in requests] == ["UNAVAILABLE"] * 3
