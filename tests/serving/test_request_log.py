"""The request log: what is in its lines, and what is in no line of any log unless it was asked for."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from fakes import FakeTriton, Load, LoadedModel

JSON_LINES = {"parameters": {"request_log": {"string_value": "json"}}}
SECRET = "xyzzy"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Lines:
    """Those of the request log since the last call; a model's are complete once it is finalized."""

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]

    return read


def test_a_request_is_logged_when_it_is_accepted_and_when_it_is_done(load: Load, lines: Lines) -> None:
    llm = load({"model": "m.gguf"}, **JSON_LINES)
    llm.ask("mine", {"max_tokens": 3, "n": 2, "octavo_priority": 4}, text_input=SECRET).sender.wait()
    llm.finalize()
    accepted, finished = lines()
    same = {
        "request_id": "mine",
        "octavo_id": "request-1",
        "model": "llm",
        "version": "1",
        "instance": "llm_0_0",
    }
    assert same.items() <= accepted.items()
    assert same.items() <= finished.items()
    assert {key: accepted[key] for key in accepted.keys() - same.keys() - {"time"}} == {
        "event": "accepted",
        "operation": "text_completion",
        "prompt_tokens": 6,
        "priority": 4,
        "n": 2,
        "max_tokens": 3,
    }
    assert accepted["time"] <= finished["time"]
    assert accepted["time"].endswith("Z")
    assert {key: finished[key] for key in finished.keys() - same.keys() - {"time"}} == {
        "event": "finished",
        "prompt_tokens": 6,
        "output_tokens": 6,
        "finish_reasons": ["length", "length"],
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "decode_s": 1.5,
        "cached_prompt_tokens": 4,
        "preemptions": 2,
        "latency_s": finished["latency_s"],
        "time_to_first_token_s": finished["time_to_first_token_s"],
    }
    assert 0 < finished["time_to_first_token_s"] <= finished["latency_s"] < 5


def test_what_fails_and_what_is_cancelled_is_logged_with_its_code(load: Load, lines: Lines) -> None:
    llm = load({"model": "m.gguf", "max_queue_size": 1}, **JSON_LINES)
    llm.ask("wrong", text_input="a", sampling_parameters='{"n": 0}').sender.error()
    llm.engine.running.clear()
    gone = llm.ask("gone", text_input="a")
    llm.ask("late", text_input="b").sender.error()
    gone.sender.cancelled = True
    gone.sender.error()
    llm.engine.running.set()
    llm.finalize()
    found = {(line["request_id"], line["event"]): line for line in lines()}
    assert sorted(found) == [
        ("gone", "accepted"),
        ("gone", "cancelled"),
        ("late", "failed"),
        ("wrong", "failed"),
    ]
    wrong, late = found["wrong", "failed"], found["late", "failed"]
    assert (wrong["code"], wrong["error"], "message" in wrong) == ("INVALID_ARG", "InvalidArgument", False)
    assert (late["code"], late["error"]) == ("UNAVAILABLE", "Unavailable")
    assert "max_queue_size is 1" in late["message"]
    assert found["gone", "cancelled"]["code"] == "CANCELLED"


def test_embeddings_and_chats_are_logged_as_what_they_are(load: Load, lines: Lines) -> None:
    llm = load({"model": "m.gguf"}, **JSON_LINES)
    llm.ask("e", embedding_request='{"input": "a"}').sender.wait()
    llm.ask("c", {"max_tokens": 1}, messages='[{"role": "user", "content": "hi"}]').sender.wait()
    llm.finalize()
    accepted = {line["request_id"]: line for line in lines() if line["event"] == "accepted"}
    assert (accepted["e"]["operation"], "max_tokens" in accepted["e"]) == ("embeddings", False)
    assert (accepted["c"]["operation"], accepted["c"]["max_tokens"]) == ("chat", 1)


def test_a_request_to_cancel_another_is_no_request_of_the_engine(load: Load, lines: Lines) -> None:
    llm = load({"model": "m.gguf"}, **JSON_LINES)
    llm.engine.running.clear()
    gone = llm.ask("gone", text_input="a")
    llm.ask("asking", cancel_request_id="gone").sender.wait()
    gone.sender.error()
    llm.engine.running.set()
    llm.finalize()
    assert {line["request_id"] for line in lines()} == {"gone"}


def test_without_being_asked_for_there_is_none(llm: LoadedModel, lines: Lines) -> None:
    llm.ask(text_input="a").sender.wait()
    llm.finalize()
    assert lines() == []


def ask_everything(llm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end well, badly and by surprise, each with a prompt that must not be seen."""
    ask = {"max_tokens": 2}
    chat = json.dumps([{"role": "user", "content": SECRET}])
    llm.ask("good", ask, text_input=SECRET, stream=True).sender.wait()
    llm.ask("ids", ask, input_ids=list(map(ord, SECRET)), exclude_input_in_output=False).sender.wait()
    llm.ask("chat", ask, messages=chat).sender.wait()
    llm.ask("embed", embedding_request=json.dumps({"input": SECRET})).sender.wait()
    llm.ask("name", {SECRET: 1}, text_input=SECRET).sender.error()
    llm.ask("value", text_input=SECRET, sampling_parameters=json.dumps({"top_p": SECRET})).sender.error()
    llm.ask("json", messages=f'[{{"role": "user", "content": "{SECRET}"').sender.error()
    llm.ask("role", messages=json.dumps([{"role": SECRET, "content": 1}])).sender.error()
    llm.ask("utf8", text_input=SECRET.encode() + b"\xff").sender.error()
    llm.ask("input", embedding_request=json.dumps({"input": [SECRET]})).sender.error()
    llm.ask("template", messages=json.dumps([{"role": "nobody", "content": SECRET}])).sender.error()
    with monkeypatch.context() as patch:

        def refuse(text: str, add_special_tokens: bool = True) -> list[int]:
            raise ValueError(f"cannot encode {text}")

        patch.setattr(llm.engine.tokenizer, "encode", refuse)
        assert SECRET in llm.ask("surprise", ask, text_input=SECRET).sender.error().message
    llm.engine.running.clear()
    late = llm.ask("late", {"octavo_deadline_ms": 1}, text_input=SECRET)
    gone = llm.ask("gone", text_input=SECRET)
    gone.sender.cancelled = True
    late.sender.error()
    gone.sender.error()
    llm.engine.running.set()
    broken = llm.ask("broken", {"max_tokens": 10**6}, text_input=SECRET, stream=True)
    broken.sender.broken = True
    llm.ask("after", ask, text_input=SECRET).sender.wait()


@pytest.mark.parametrize("config", [{}, JSON_LINES])
def test_no_prompt_is_in_any_log_at_any_level(
    load: Load,
    triton: FakeTriton,
    config: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = load({"model": "m.gguf", "disable_log_requests": True, "max_log_len": 100}, **config)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("octavo").setLevel(logging.DEBUG)
        ask_everything(llm, monkeypatch)
        llm.finalize()
    printed = capfd.readouterr()
    assert "request-12 (client's id 'surprise') could not be prepared: ValueError" in triton.log()
    assert "in refuse" in triton.log()
    assert ('"event": "finished"' in printed.err) == bool(config)
    assert SECRET not in triton.log() + printed.out + printed.err
    assert SECRET not in "".join(logging.Formatter().format(record) for record in caplog.records)


def test_prompts_are_logged_on_request_as_far_as_asked(load: Load, lines: Lines) -> None:
    llm = load({"model": "m.gguf", "enable_log_requests": True, "max_log_len": 3})
    parameters = {"max_tokens": 1, "stop": "never", "seed": 5}
    llm.ask("text", text_input=SECRET, sampling_parameters=json.dumps(parameters)).sender.wait()
    llm.ask("ids", {"max_tokens": 1}, input_ids=[7, 8, 9, 10]).sender.wait()
    llm.ask("wrong", text_input="a", sampling_parameters='{"n": 0}').sender.error()
    llm.finalize()
    found = {(line["request_id"], line["event"]): line for line in lines()}
    text, ids = found["text", "accepted"], found["ids", "accepted"]
    assert (text["prompt"], text["sampling_parameters"]) == (
        "xyz",
        {"max_tokens": 1, "stop": ["never"], "seed": 5},
    )
    assert (ids["prompt_token_ids"], "prompt" in ids) == ([7, 8, 9], False)
    assert found["wrong", "failed"]["message"].startswith("'n' is 0; allowed: ")


@pytest.mark.parametrize(("most", "shown"), [(None, SECRET), (0, "")])
def test_all_of_a_prompt_is_logged_unless_there_is_a_limit(
    load: Load, lines: Lines, most: int | None, shown: str
) -> None:
    llm = load({"model": "m.gguf", "enable_log_requests": True, "max_log_len": most})
    llm.ask(text_input=SECRET, parameters={"max_tokens": 1}).sender.wait()
    llm.finalize()
    assert lines()[0]["prompt"] == shown
