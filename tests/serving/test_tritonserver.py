"""The glue, without a server: one final response for every request, whatever happens to it."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes import FakeTriton, InferenceRequest, Load, LoadedModel, TritonModelException, real_model_config
from octavo.serving import codec, intake
from waiting import wait_until


def sampling(**values: Any) -> str:
    return json.dumps(values)


ENDLESS = sampling(max_tokens=10**6)


def test_the_configuration_is_completed_from_the_table(glue: ModuleType) -> None:
    config = glue.TritonPythonModel.auto_complete_config(real_model_config({})).as_dict()
    assert [entry["name"] for entry in config["input"]] == [spec.name for spec in codec.INPUTS]
    assert all(entry["optional"] for entry in config["input"])
    assert config["output"] == [spec.config() for spec in codec.OUTPUTS]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0


def test_what_a_repository_declares_itself_stays(glue: ModuleType) -> None:
    declared = [
        {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False},
        {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1], "optional": True},
    ]
    config = glue.TritonPythonModel.auto_complete_config(real_model_config({"input": declared})).as_dict()
    assert config["input"][:2] == declared
    assert len(config["input"]) == len(codec.INPUTS)


def test_a_batching_repository_is_refused(glue: ModuleType) -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        glue.TritonPythonModel.auto_complete_config(real_model_config({"max_batch_size": 8}))


def test_paths_in_model_json_are_relative_to_it(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "llm/1"
    arguments = load({"model": "weights/m.gguf", "tokenizer": "/elsewhere", "seed": 1}).engine.arguments
    assert arguments == {"model": str(folder / "weights/m.gguf"), "tokenizer": "/elsewhere", "seed": 1}
    assert load({"model": "pkg://package/m.gguf"}).engine.arguments == {"model": "pkg://package/m.gguf"}
    recorded = load({"model": "pkg://package/m.gguf", "record_steps": "steps"}).engine.arguments
    assert recorded == {"model": "pkg://package/m.gguf", "record_steps": str(folder / "steps")}


@pytest.mark.parametrize(
    ("model_json", "config", "words"),
    [
        ("{", {}, r"model.json: 'model.json' is not valid JSON"),
        ('{"model": "a", "model": "b"}', {}, r"'model.json' has the key 'model' twice"),
        (
            "{}",
            {"parameters": {"shutdown_timeout_s": {"string_value": "soon"}}},
            "'shutdown_timeout_s' is 'soon'",
        ),
        ("{}", {"parameters": {"shutdown_timeout_s": {"string_value": "-1"}}}, "allowed: 0 to 86400"),
        (
            "{}",
            {"parameters": {"coalesce_responses": {"string_value": "no"}}},
            "'coalesce_responses' is 'no'; allowed: 'true' .* and 'false' ",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why_in_one_line(
    load: Load, model_json: str, config: Any, words: str
) -> None:
    with pytest.raises(TritonModelException, match=words) as error:
        load(model_json, **config)
    assert str(error.value).startswith("llm cannot be loaded: ")
    assert "\n" not in str(error.value)


def test_a_missing_model_json_is_named(glue: ModuleType, tmp_path: Path) -> None:
    args = {
        "model_name": "llm",
        "model_version": "1",
        "model_repository": str(tmp_path),
        "model_config": "{}",
    }
    with pytest.raises(TritonModelException, match=r"1/model\.json cannot be read: .*No such file"):
        glue.TritonPythonModel().initialize(args)


def test_a_request_without_streaming_gets_exactly_one_response(llm: LoadedModel) -> None:
    request = llm.ask(
        text_input="Say: ", sampling_parameters=sampling(max_tokens=3), return_finish_reason=True
    )
    assert request.sender.texts() == [["Say: abc"]]
    assert request.sender.responses[0].outputs["finish_reason"].tolist() == [b"length"]


def test_a_stream_gets_deltas_and_one_final_flag(llm: LoadedModel) -> None:
    request = llm.ask(text_input="Say: ", stream=True, sampling_parameters=sampling(max_tokens=5, n=2))
    texts = request.sender.texts()
    assert len(texts) > 1
    assert ["".join(parts) for parts in zip(*texts, strict=True)] == ["abcde", "abcde"]


def test_ids_and_chats_reach_the_engine_and_their_text_can_be_echoed(llm: LoadedModel) -> None:
    parameters = {"max_tokens": 1, "octavo_priority": 2, "cache_salt": "s"}
    ids = llm.ask("", parameters, input_ids=[ord("h"), ord("i")], return_cumulative_logprob=True)
    chat = llm.ask(messages='[{"role": "user", "content": "hi"}]', sampling_parameters=sampling(max_tokens=1))
    assert ids.sender.texts() == [["hia"]]
    assert chat.sender.texts() == [["<user>hia"]]
    first, second = llm.engine.seen
    assert first.prompt_token_ids == (ord("h"), ord("i"))
    assert (first.priority, first.cache_salt, first.cumulative_logprob) == (2, "s", True)
    assert second.prompt_token_ids == tuple(map(ord, "<user>hi"))  # the template alone places special tokens


def test_requests_of_one_batch_are_answered_by_one_thread(llm: LoadedModel) -> None:
    requests = [InferenceRequest(text_input=str(i), parameters={"max_tokens": 4}) for i in range(20)]
    llm.execute(*requests)
    assert [r.sender.texts() for r in requests] == [[[f"{i}abcd"]] for i in range(20)]
    assert {name for r in requests for name in r.sender.threads} == {"octavo-sender"}


@pytest.mark.parametrize("coalesce", ["true", "false", None])
def test_a_sender_that_is_behind_merges_what_waits_for_a_stream_unless_told_not_to(
    load: Load, triton: FakeTriton, coalesce: str | None
) -> None:
    llm = load(parameters={"coalesce_responses": {"string_value": coalesce}} if coalesce else {})
    slow = InferenceRequest(text_input="", stream=True, parameters={"max_tokens": 26})
    slow.sender.unblocked.clear()
    llm.execute(slow)
    wait_until(lambda: llm.engine.finished == {"length": 1})
    slow.sender.unblocked.set()
    texts = slow.sender.texts()
    llm.finalize()
    coalesced = triton.metric("octavo:coalesced_responses_total", model="llm", version="1").value
    assert "".join(text for (text,) in texts) == "abcdefghijklmnopqrstuvwxyz"
    if coalesce == "false":
        assert (len(texts), coalesced) == (26, 0)
    else:
        assert (len(texts), coalesced) == (2, 24)  # the one that was blocked, and all the rest


def test_execute_waits_for_nothing(llm: LoadedModel) -> None:
    llm.engine.tokenizer.hold = "x"
    blocked = InferenceRequest(text_input="x")
    blocked.sender.unblocked.clear()
    started = time.monotonic()
    llm.execute(blocked, *(InferenceRequest(text_input="x") for _ in range(50)))
    assert time.monotonic() - started < 2.5  # and not the 5 s that tokenising takes
    blocked.sender.unblocked.set()


def test_a_large_last_response_goes_ahead_of_its_final_flag(glue: ModuleType, llm: LoadedModel) -> None:
    """So that an error can follow when it does not fit in shared memory: with the flag the sender is closed
    whether it did or not."""
    much = glue._SMALL_RESPONSE_BYTES
    small, large, unfit = (
        InferenceRequest(text_input="x" * size, parameters={"max_tokens": 1}) for size in (1000, much, much)
    )
    unfit.sender.most_bytes = 1000
    llm.execute(small, large, unfit)
    assert small.sender.texts() == [["x" * 1000 + "a"]]
    assert small.sender.finals == [True]
    assert large.sender.texts() == [["x" * much + "a"]]
    assert large.sender.finals == [False, True]
    assert unfit.sender.error().message.startswith("[INTERNAL] the response could not be sent: TritonModel")
    assert len(unfit.sender.responses) == 1
    assert unfit.sender.finals == [False, True]


def test_a_long_prompt_does_not_stall_the_others(llm: LoadedModel) -> None:
    llm.engine.tokenizer.hold = "y"
    long = llm.ask(text_input="y" * (intake.LONG_PROMPT_BYTES + 1), exclude_input_in_output=True)
    assert llm.engine.tokenizer.holding.wait(5)
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]
    assert not long.sender.closed.is_set()
    llm.engine.tokenizer.released.set()
    assert long.sender.texts() == [["abcdefghijklmnop"]]


def test_a_bad_request_gets_its_error_and_the_others_are_untouched(llm: LoadedModel) -> None:
    bad = InferenceRequest(text_input="a", sampling_parameters=sampling(n=0))
    good = InferenceRequest(text_input="a", parameters={"max_tokens": 1})
    large = InferenceRequest(text_input="a", sampling_parameters=" " * (2 << 20))
    empty = InferenceRequest(input_ids=[])
    llm.execute(bad, good, large, empty)
    assert good.sender.texts() == [["aa"]]
    assert bad.sender.error().message == "[INVALID_ARG] 'n' is 0; allowed: 1 to 128"
    assert bad.sender.error().code == "INVALID_ARG"
    assert large.sender.error().message.startswith("[INVALID_ARG] 'sampling_parameters' has 2097152 bytes")
    assert empty.sender.error().message == "[INVALID_ARG] the prompt is empty"


def test_a_bug_in_the_way_is_an_internal_error_of_one_request(llm: LoadedModel, triton: FakeTriton) -> None:
    bad = llm.ask("job", messages='[{"role": "nobody", "content": "a secret"}]')
    error = bad.sender.error()
    assert error.code == "INTERNAL"
    assert error.message.startswith("[INTERNAL] the request could not be prepared: ZeroDivisionError")
    assert "Traceback" in triton.log()
    assert "(client's id 'job') could not be prepared" in triton.log()
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]


def test_a_tensor_that_cannot_be_read_is_an_error_of_its_own_request(llm: LoadedModel) -> None:
    broken, good = InferenceRequest(text_input="a"), InferenceRequest(text_input="a")
    broken.parameters = lambda: 1 / 0  # type: ignore[method-assign]
    llm.execute(broken, good)
    assert broken.sender.error().message.startswith("[INTERNAL] the request could not be read: ZeroDivision")
    assert good.sender.texts() == [["aabcdefghijklmnop"]]


def test_when_the_engine_fails_everyone_is_told_why(llm: LoadedModel, triton: FakeTriton) -> None:
    request = llm.ask(text_input="a", sampling_parameters=ENDLESS)
    wait_until(lambda: llm.engine.open)
    llm.engine.broken = RuntimeError("the card is gone")
    assert "the card is gone" in request.sender.error().message
    later = llm.ask(text_input="a").sender.error()
    assert later.message.startswith("[INTERNAL] the engine has failed and takes no requests")
    wait_until(lambda: triton.metric("octavo:ready").value == 0)


def test_a_client_that_cannot_be_sent_to_is_dropped(llm: LoadedModel, triton: FakeTriton) -> None:
    gone = InferenceRequest(text_input="a", stream=True, sampling_parameters=ENDLESS)
    gone.sender.broken = True
    llm.execute(gone)
    wait_until(lambda: llm.engine.finished == {"abort": 1})
    assert llm.engine.open == {}
    assert "its response could not be sent" in triton.log()
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]


def test_a_request_that_the_server_has_lost_is_dropped_and_no_other(
    llm: LoadedModel, triton: FakeTriton
) -> None:
    kept = InferenceRequest(text_input="a")
    lost = llm.ask(text_input="a", stream=True, sampling_parameters=ENDLESS)
    wait_until(lambda: lost.sender.responses)
    lost.sender.is_cancelled = lambda: 1 / 0  # type: ignore[method-assign]
    wait_until(lambda: llm.engine.finished == {"abort": 1})
    assert lost.sender.error().code == "INTERNAL"
    kept.sender.cancelled = True
    llm.engine.running.clear()
    llm.execute(kept)
    assert kept.sender.error().code == "CANCELLED"
    assert triton.log().count("the server does not know it any more") == 1


def test_a_cancelled_request_frees_the_engine_and_gets_one_final_error(llm: LoadedModel) -> None:
    request = llm.ask(text_input="a", stream=True, sampling_parameters=ENDLESS)
    wait_until(lambda: request.sender.responses)
    request.sender.cancelled = True
    started = time.monotonic()
    error = request.sender.error()
    assert time.monotonic() - started < 0.2
    assert (error.code, error.message[:12]) == ("CANCELLED", "[CANCELLED] ")
    assert llm.engine.open == {}


def test_a_request_is_cancelled_while_it_waits_for_the_tokenizer(llm: LoadedModel) -> None:
    llm.engine.tokenizer.hold = "x"
    first = llm.ask(text_input="x")
    assert llm.engine.tokenizer.holding.wait(5)
    behind = llm.ask(text_input="behind")
    first.sender.cancelled = behind.sender.cancelled = True
    assert first.sender.error().code == "CANCELLED"
    assert behind.sender.error().code == "CANCELLED"
    llm.engine.tokenizer.released.set()
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]
    assert [len(request.prompt_token_ids) for request in llm.engine.seen] == [1]  # the two never got there


def test_requests_are_cancelled_by_the_id_that_their_client_set(llm: LoadedModel) -> None:
    twins = [llm.ask("job", text_input="a", sampling_parameters=ENDLESS) for _ in range(2)]
    other = llm.ask("other", text_input="a", sampling_parameters=ENDLESS)
    wait_until(lambda: len(llm.engine.open) == 3)
    answer = llm.ask("job", cancel_request_id="job")
    assert answer.sender.texts() == [[""]]
    assert [twin.sender.error().code for twin in twins] == ["CANCELLED"] * 2
    assert not other.sender.closed.is_set()


def test_cancelling_an_unknown_id_is_not_found(llm: LoadedModel) -> None:
    error = llm.ask("ghost", cancel_request_id="ghost").sender.error()
    assert error.code == "NOT_FOUND"
    assert error.message.startswith("[NOT_FOUND] no open request has the id 'ghost'")


def test_finalize_answers_everyone_wherever_they_are(load: Load) -> None:
    llm = load(parameters={"shutdown_timeout_s": {"string_value": "0.1"}})
    llm.engine.tokenizer.hold = "x"
    running = llm.ask(text_input="a", stream=True, sampling_parameters=ENDLESS)
    wait_until(lambda: llm.engine.open)
    tokenising = llm.ask(text_input="x")
    assert llm.engine.tokenizer.holding.wait(5)
    queued = llm.ask(text_input="behind")
    threading.Timer(0.3, llm.engine.tokenizer.released.set).start()
    started = time.monotonic()
    llm.finalize()
    assert time.monotonic() - started < 2
    for request in (running, tokenising, queued):
        assert request.sender.error().code == "UNAVAILABLE"
        assert request.sender.error().message.startswith("[UNAVAILABLE] ")


def test_finalize_lets_a_request_finish_within_its_time(load: Load) -> None:
    llm = load()
    request = llm.ask(text_input="", parameters={"max_tokens": 26})
    wait_until(lambda: llm.engine.seen)
    llm.finalize()
    assert request.sender.texts() == [["abcdefghijklmnopqrstuvwxyz"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_requests_before_finalize_and_old_handlers_come_back(load: Load, number: int) -> None:
    before = signal.getsignal(number)
    llm = load(parameters={"shutdown_timeout_s": {"string_value": "0.1"}})
    request = llm.ask(text_input="a", sampling_parameters=ENDLESS)
    wait_until(lambda: llm.engine.open)
    os.kill(os.getpid(), number)
    assert request.sender.error().code == "UNAVAILABLE"
    assert (
        llm.ask(text_input="late")
        .sender.error()
        .message.startswith("[UNAVAILABLE] the server is shutting down")
    )
    llm.finalize()
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_log_says_what_happens_but_not_what_was_asked(llm: LoadedModel, triton: FakeTriton) -> None:
    llm.ask("job", text_input="a-secret", parameters={"max_tokens": 1}).sender.wait()
    llm.ask(text_input="a-secret", sampling_parameters=sampling(stop=["a-secret"], n=0)).sender.wait()
    llm.ask(text_input="a-secret", stream=True, exclude_input_in_output=False).sender.wait()
    assert "llm_0_0: version 1 is ready" in triton.log()
    assert "a-secret" not in triton.log()


def test_the_repository_and_the_backend_folder_re_export_the_same_model(glue: ModuleType) -> None:
    from octavo.serving.installation import BACKEND_MODEL

    path = Path(__file__).parents[2] / "model_repository/llm/1/model.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 15
    for source in (text, BACKEND_MODEL):
        namespace: dict[str, Any] = {}
        exec(compile(source, "model.py", "exec"), namespace)
        assert namespace["TritonPythonModel"] is sys.modules["octavo.serving.tritonserver"].TritonPythonModel
