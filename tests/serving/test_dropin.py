"""What operators of Triton's vLLM backend rely on, without a server: its parameters, words and placement."""

import json
import os
from pathlib import Path

import pytest

from fakes import FakeTriton, Load, LoadedModel, TritonModelException
from waiting import wait_until

ENDLESS = json.dumps({"max_tokens": 10**6})


def parameters(**values: str) -> dict[str, dict[str, str]]:
    return {name: {"string_value": value} for name, value in values.items()}


def fail(llm: LoadedModel) -> None:
    request = llm.ask(text_input="a", sampling_parameters=ENDLESS)
    wait_until(lambda: llm.engine.open)
    llm.engine.broken = RuntimeError("the card is gone")
    assert "the card is gone" in request.sender.error().message


def test_an_engine_that_cannot_go_on_unloads_its_model_once_when_asked_to(
    load: Load, triton: FakeTriton
) -> None:
    llm = load(parameters=parameters(ENABLE_VLLM_HEALTH_CHECK="true"))
    assert llm.ask(text_input="a", parameters={"max_tokens": 1}).sender.texts() == [["aa"]]
    assert triton.unloaded == []
    fail(llm)
    for _ in range(2):
        error = llm.ask(text_input="a").sender.error()
        assert error.code == "UNAVAILABLE"
        assert error.message.startswith("[UNAVAILABLE] the model is being unloaded, since its engine cannot")
        assert "the card is gone" in error.message
    assert triton.unloaded == ["llm"]


def test_without_the_health_check_the_model_stays(load: Load, triton: FakeTriton) -> None:
    llm = load()
    fail(llm)
    assert llm.ask(text_input="a").sender.error().code == "INTERNAL"
    assert triton.unloaded == []


def test_a_server_that_does_not_unload_is_no_reason_to_answer_less(load: Load, triton: FakeTriton) -> None:
    llm = load(parameters=parameters(ENABLE_VLLM_HEALTH_CHECK="true"))
    triton.module.unload_model = lambda name: 1 / 0
    fail(llm)
    assert llm.ask(text_input="a").sender.error().code == "UNAVAILABLE"
    assert "it cannot be, which takes --model-control-mode=explicit" in triton.log()


@pytest.mark.parametrize(("backend", "name"), [("vllm", "vllm"), ("octavo", "octavo"), ("python", "octavo")])
def test_a_cancellation_is_logged_in_the_words_of_that_backend(
    load: Load, triton: FakeTriton, backend: str, name: str
) -> None:
    llm = load(backend=backend)
    request = llm.ask("job", text_input="a", stream=True, sampling_parameters=ENDLESS)
    wait_until(lambda: request.sender.responses)
    request.sender.cancelled = True
    assert request.sender.error().code == "CANCELLED"
    llm.finalize()
    lines = [text for _, text in triton.log_lines if "ancel" in text]
    assert [line.partition(" request-")[0] for line in lines] == [
        f"[{name}] Cancelling the request",
        f"[{name}] Successfully cancelled the request",
    ]
    assert "(client's id 'job')" in lines[0]


def test_metrics_can_be_switched_off(load: Load, triton: FakeTriton) -> None:
    llm = load(parameters=parameters(REPORT_CUSTOM_METRICS="no"))
    assert llm.ask(text_input="", parameters={"max_tokens": 1}).sender.texts() == [["a"]]
    llm.finalize()
    assert triton.metrics == {}


def test_readiness_is_lost_and_comes_back_with_its_cause(llm: LoadedModel, triton: FakeTriton) -> None:
    def ready() -> bool:
        return triton.metric("octavo:ready").value == 1

    wait_until(ready)
    model = llm._model
    model._health._stalled_s = 0.01
    llm.engine.steps.begin(1, 1)
    wait_until(lambda: not ready())
    assert not model.is_ready()
    llm.engine.steps.end()
    assert model.is_ready()
    wait_until(ready)
    assert "not ready: a step has been running for more than 0.01 s" in triton.log()
    assert triton.log().endswith("ready again")


def test_the_instance_group_says_where_the_engine_computes(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    on_cpu = load(args={"model_instance_kind": "CPU"})
    assert on_cpu.engine.arguments["device"] == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    on_gpu = load(args={"model_instance_kind": "GPU", "model_instance_device_id": "1"})
    assert on_gpu.engine.arguments["device"] == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_adapters_are_refused_by_name_at_load_and_in_a_request(load: Load, tmp_path: Path) -> None:
    llm = load()
    (tmp_path / "llm/1/multi_lora.json").write_text('{"sql": "/adapters/sql"}')
    with pytest.raises(TritonModelException, match=r"'enable_lora' is true \(multi_lora.json names: sql\)"):
        load({"model": "m.gguf", "enable_lora": "true"})
    error = llm.ask(text_input="a", sampling_parameters='{"lora_name": "sql"}').sender.error()
    assert error.code == "NOT_FOUND"
    assert error.message.startswith("[NOT_FOUND] no adapter 'sql' is here")
    error = llm.ask(text_input="a", parameters={"lora_name": "sql"}).sender.error()
    assert error.code == "NOT_FOUND"
