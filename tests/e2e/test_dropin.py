"""A repository made for Triton's vLLM backend, unchanged, on a real server: callers in front of it, several
instances and versions, and an engine that fails and is healed."""

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.serving.launcher import RunningServer
from triton_clients import GrpcStream, Metrics, StartServer, make_repository, post, wait_for_metric

GREEDY = json.dumps({"temperature": 0, "max_tokens": 6, "ignore_eos": True})
# The sample repository of that backend has these, as they are written there.
VLLMS_OWN = {"disable_log_requests": "true", "gpu_memory_utilization": 0.5, "enforce_eager": "true"}

BLS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            def given(name):
                return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

            asked = pb_utils.InferenceRequest(
                model_name="llm",
                requested_output_names=["text_output"],
                inputs=[
                    pb_utils.Tensor("text_input", given("prompt")),
                    pb_utils.Tensor("sampling_parameters", given("sampling")),
                    pb_utils.Tensor("stream", np.array([True])),
                ],
            )
            pieces = []
            for response in asked.exec(decoupled=True):
                if response.has_error():
                    return pb_utils.InferenceResponse(error=response.error())
                tensor = pb_utils.get_output_tensor_by_name(response, "text_output")
                if tensor is not None:
                    pieces.append(tensor.as_numpy()[0])
            answer = pb_utils.Tensor("answer", np.array([b"|".join(pieces)], object))
            return pb_utils.InferenceResponse([answer])
"""
TENSORS = """
    input [
      { name: "prompt" data_type: TYPE_STRING dims: [1] },
      { name: "sampling" data_type: TYPE_STRING dims: [1] }
    ]
    output [ { name: "answer" data_type: TYPE_STRING dims: [-1] } ]
"""
STEP = """
    platform: "ensemble"
    ensemble_scheduling {
      step [ {
        model_name: "llm"
        model_version: -1
        input_map { key: "text_input" value: "prompt" }
        input_map { key: "sampling_parameters" value: "sampling" }
        output_map { key: "text_output" value: "answer" }
      } ]
    }
"""


def add_model(repository: Path, name: str, config: str, files: dict[str, str] | None = None) -> None:
    for path, text in {"config.pbtxt": config, **(files or {})}.items():
        (repository / name / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / name / path).write_text(textwrap.dedent(text))


def ask(server: RunningServer, model: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"http://{server.http}/v2/models/{model}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def dropin(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory, weights: str
) -> RunningServer:
    """The server on a repository of the vLLM backend, with a BLS model and an ensemble in front."""
    repository = make_repository(
        tmp_path_factory.mktemp("repository"),
        backend="vllm",
        parameters={"REPORT_CUSTOM_METRICS": "true"},
        model=weights,
        dtype="float32",
        max_model_len=512,
        **VLLMS_OWN,
    )
    add_model(repository, "bls", 'backend: "python"' + TENSORS, {"1/model.py": BLS})
    add_model(repository, "flow", STEP + TENSORS)
    (repository / "flow/1").mkdir()
    assert not list((repository / "llm").rglob("*.py"))
    return start_server(repository, backend_names=("octavo", "vllm"))


def test_clients_of_that_backend_find_what_they_know(dropin: RunningServer) -> None:
    answer = ask(dropin, "llm", text_input="the", sampling_parameters='{"temperature": "0", "max_tokens": 4}')
    assert answer["text_output"].startswith("the")
    with GrpcStream(dropin) as stream:
        parts = stream.send(text_input="the", stream=True, sampling_parameters=GREEDY).all()
    assert parts[-1].final
    wait_for_metric(dropin, 0, "vllm:num_requests_running", model="llm", version="1")


def test_a_cancellation_is_logged_in_that_backends_words(dropin: RunningServer) -> None:
    endless = json.dumps({"max_tokens": 500, "ignore_eos": True, "n": 4})
    stream = GrpcStream(dropin)
    stream.send("job", text_input="the", stream=True, sampling_parameters=endless)
    stream.next()
    stream.cancel()
    deadline = time.monotonic() + 10
    while "[vllm] Successfully cancelled the request" not in (text := dropin.log_path.read_text("utf-8")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "[vllm] Cancelling the request" in text


def test_an_adapter_that_is_not_here_is_not_found(dropin: RunningServer) -> None:
    status, answer = post(
        dropin, "generate", {"text_input": "a", "sampling_parameters": '{"lora_name": "x"}'}
    )
    assert status in (400, 404)
    assert answer["error"].startswith("[NOT_FOUND] no adapter 'x' is here")


def test_a_bls_model_in_front_reads_the_stream(dropin: RunningServer) -> None:
    whole = ask(dropin, "llm", text_input="the", sampling_parameters=GREEDY, exclude_input_in_output=True)[
        "text_output"
    ]
    answer = ask(dropin, "bls", prompt="the", sampling=GREEDY)["answer"]
    assert answer.count("|") >= 1
    assert answer.replace("|", "") == whole
    refused = httpx.post(
        f"http://{dropin.http}/v2/models/bls/generate", json={"prompt": "the", "sampling": '{"n": 0}'}
    )
    assert refused.status_code == 400 or refused.status_code == 500
    assert "[INVALID_ARG] 'n' is 0" in refused.json()["error"]


def test_an_ensemble_in_front_passes_the_answer_on(dropin: RunningServer) -> None:
    whole = ask(dropin, "llm", text_input="the", sampling_parameters=GREEDY)["text_output"]
    assert ask(dropin, "flow", prompt="the", sampling=GREEDY)["answer"] == whole


def test_two_instances_and_two_versions(start_server: StartServer, tmp_path: Path, weights: str) -> None:
    """Both instances are asked, count together, and give the same; each version is its own model."""
    engine = {"model": weights, "dtype": "float32", "max_model_len": 64, "num_threads": 1}
    add_model(
        tmp_path,
        "pair",
        'backend: "octavo"\ninstance_group [{ count: 2 kind: KIND_CPU }]',
        {"1/model.json": json.dumps(engine)},
    )
    add_model(
        tmp_path,
        "aged",
        'backend: "octavo"\nversion_policy: { all {} }\ninstance_group [{ kind: KIND_CPU }]',
        {"1/model.json": json.dumps({**engine, "max_model_len": 8}), "2/model.json": json.dumps(engine)},
    )
    server = start_server(tmp_path)
    answers = {
        ask(server, "pair", text_input="the", sampling_parameters=GREEDY)["text_output"] for _ in range(6)
    }
    assert len(answers) == 1
    for version, status in ((1, 400), (2, 200)):
        answer = httpx.post(
            f"http://{server.http}/v2/models/aged/versions/{version}/generate",
            json={"text_input": "a prompt of eleven", "sampling_parameters": GREEDY},
        )
        assert answer.status_code == status, answer.text
    wait_for_metric(server, 2, "octavo:ready", model="pair")
    wait_for_metric(server, 6 * 6, "vllm:generation_tokens_total", model="pair")
    assert Metrics(server).value("octavo:ready", model="aged", version="1") == 1
    wait_for_metric(server, 6, "vllm:generation_tokens_total", model="aged", version="2")


BREAKS = """
    from pathlib import Path
    from octavo.serving.tritonserver import TritonPythonModel as Octavo

    class TritonPythonModel(Octavo):
        def initialize(self, args):
            super().initialize(args)
            step, broken = self._engine.step, Path(__file__).with_name("broken")

            def step_unless_broken():
                if broken.exists():
                    raise RuntimeError("the card is gone")
                return step()

            self._engine.step = step_unless_broken
"""


def test_an_engine_that_fails_unloads_its_model_and_loading_heals_it(
    start_server: StartServer, tmp_path: Path, weights: str
) -> None:
    repository = make_repository(
        tmp_path,
        backend="python",
        parameters={"ENABLE_VLLM_HEALTH_CHECK": "true"},
        model=weights,
        max_model_len=128,
        num_threads=1,
    )
    (repository / "llm/1/model.py").write_text(textwrap.dedent(BREAKS))
    server = start_server(repository)
    body = {"text_input": "the", "sampling_parameters": GREEDY}
    assert post(server, "generate", body)[0] == 200
    (repository / "llm/1/broken").touch()
    status, answer = post(server, "generate", body)
    assert status >= 400
    assert answer["error"].startswith("[INTERNAL] the engine has failed")
    assert "the card is gone" in answer["error"]
    status, answer = post(server, "generate", body)
    assert answer["error"].startswith(
        "[UNAVAILABLE] the model is being unloaded, since its engine cannot go on"
    )
    deadline = time.monotonic() + 20
    while httpx.get(f"http://{server.http}/v2/models/llm/ready").status_code == 200:
        assert time.monotonic() < deadline, "the model was not unloaded"
        time.sleep(0.1)
    assert httpx.get(f"http://{server.http}/v2/health/live").status_code == 200
    (repository / "llm/1/broken").unlink()
    loaded = httpx.post(f"http://{server.http}/v2/repository/models/llm/load", json={}, timeout=60)
    assert loaded.status_code == 200
    assert post(server, "generate", body)[0] == 200
    wait_for_metric(server, 1, "octavo:ready")
