"""The metrics after a load whose numbers are known, and after the model was replaced."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from octavo.serving.launcher import RunningServer
from octavo.serving.model_processes import model_processes
from tiny import tiny_llama
from triton_clients import Metrics, generate, make_repository, post
from waiting import wait_until

LOAD = 'The same prompt for everyone, a little longer than one block of the cache so that it can be "found".'
TOTALS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "octavo:coalesced_responses_total",
)
SUMS = (
    "vllm:request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:request_params_n_sum",
    "vllm:request_params_best_of_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:iteration_tokens_total_sum",
    "octavo:steps_total",
    "octavo:batch_size_count",
    "octavo:step_time_seconds_count",
)
LABELS = {"model": "llm", "version": "1"}


def read(server: RunningServer) -> Metrics:
    """What they say once everything before this call is in them: they are refreshed every second."""
    time.sleep(1.5)
    return Metrics(server)


def test_totals_gauges_and_latencies_after_a_scripted_load(llm: RunningServer) -> None:
    before = read(llm)
    four = json.dumps({"max_tokens": 4, "ignore_eos": True})
    answers = [
        generate(llm, text_input=LOAD, sampling_parameters=four, return_num_input_tokens=True)
        for _ in range(3)
    ]
    stopped = generate(
        llm,
        text_input=LOAD,
        sampling_parameters='{"temperature": 0, "stop": "e", "max_tokens": 40}',
        return_num_output_tokens=True,
    )
    post(llm, "generate", {"text_input": LOAD, "sampling_parameters": '{"n": 0}'})
    after = read(llm)
    tokens = answers[0]["num_input_tokens"]
    full_blocks = 16 * ((tokens - 1) // 16)
    assert {name: after.value(name, **LABELS) - before.value(name) for name in TOTALS} == {
        "vllm:prompt_tokens_total": 4 * tokens,
        "vllm:generation_tokens_total": 3 * 4 + stopped["num_output_tokens"],
        "vllm:prefix_cache_queries_total": 4 * tokens,
        "vllm:prefix_cache_hits_total": 3 * full_blocks,
        "vllm:time_to_first_token_seconds_count": 4,
        "vllm:time_per_output_token_seconds_count": 3 + (stopped["num_output_tokens"] > 1),
        "vllm:e2e_request_latency_seconds_count": 4,
        "octavo:coalesced_responses_total": 0,
    }
    for name in ("vllm:request_success_total", "octavo:finished_requests_total"):
        finished = {
            reason: after.value(name, finished_reason=reason, **LABELS)
            - before.value(name, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert finished == {"stop": 1, "length": 3, "abort": 0, "error": 0}
    for name, expected in (("octavo:refused_requests_total", 1), ("octavo:failed_requests_total", 0)):
        errors = {
            code: after.value(name, code=code, **LABELS) - before.value(name, code=code)
            for code in ("INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL")
        }
        assert errors == {**dict.fromkeys(errors, 0), "INVALID_ARG": expected}
    for gauge in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "octavo:kv_blocks_used",
    ):
        assert after.value(gauge, instance="llm_0_0", **LABELS) == 0
    growth = {name: after.value(name, **LABELS) - before.value(name) for name in SUMS}
    steps = growth.pop("octavo:steps_total")
    assert growth == {
        "vllm:request_prompt_tokens_sum": 4 * tokens,
        "vllm:request_generation_tokens_sum": 3 * 4 + stopped["num_output_tokens"],
        "vllm:request_params_n_sum": 4,
        "vllm:request_params_best_of_sum": 4,
        "vllm:request_params_max_tokens_sum": 3 * 4 + 40,
        # Every token that was not in the cache, and each generated one but a sequence's last.
        "vllm:iteration_tokens_total_sum": pytest.approx(
            4 * tokens - 3 * full_blocks + 3 * 3 + stopped["num_output_tokens"] - 1, abs=1
        ),
        "octavo:batch_size_count": steps,
        "octavo:step_time_seconds_count": steps,
    }
    times = [f"vllm:request_{name}_time_seconds" for name in ("queue", "prefill", "decode", "inference")]
    for name in (*times, "octavo:queue_time_seconds"):
        assert after.value(f"{name}_count") - before.value(f"{name}_count") == 4
    forward_s, sampling_s, step_s = (
        after.value(f"octavo:{name}_seconds_total", **LABELS) - before.value(f"octavo:{name}_seconds_total")
        for name in ("forward", "sampling", "step")
    )
    assert 0 < sampling_s < forward_s < forward_s + sampling_s < step_s
    blocks = {
        kind: after.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind, **LABELS)
        for kind in ("max", "used", "free", "tokens_per", "fraction")
    }
    assert blocks["max"] == blocks["free"] == after.value("octavo:kv_blocks") > 0
    assert (blocks["used"], blocks["tokens_per"], blocks["fraction"]) == (0, 16, 0)
    assert after.value("octavo:kv_blocks_shared") == 0
    assert after.value("octavo:kv_blocks_reusable") == after.value("octavo:kv_blocks_cached") > 0
    for kind in ("waiting", "scheduled"):
        assert after.value("nv_trt_llm_request_metrics", request_type=kind) == 0
    assert after.value("octavo:ready", instance="llm_0_0", **LABELS) == 1
    assert after.value("vllm:num_preemptions_total") == after.value("octavo:preemptions_total") == 0


def test_metrics_and_model_outlive_reloading(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """A reload has two instances at once for a moment: the old one must not take the metrics along."""
    tiny_llama(tmp_path / "model")
    folder = str(tmp_path / "model")
    repository = make_repository(
        tmp_path / "repository", backend="octavo", model=folder, max_model_len=128, num_threads=1
    )
    server = start_server(repository)
    for count in range(1, 3):
        assert generate(server, text_input="the", max_tokens=4)["text_output"]
        totals = read(server)
        assert totals.value("vllm:e2e_request_latency_seconds_count", **LABELS) == count
        assert totals.value("octavo:ready", instance="llm_0_0", **LABELS) == 1
        (old,) = model_processes(server.process.pid)
        (repository / "llm" / "1" / "model.json").touch()
        answer = httpx.post(f"http://{server.http}/v2/repository/models/llm/load", json={}, timeout=60)
        assert answer.status_code == 200
        wait_until(lambda old=old: old not in model_processes(server.process.pid), "not reloaded", 60)
    assert httpx.post(f"http://{server.http}/v2/repository/models/llm/unload", json={}).status_code == 200
    deadline = time.monotonic() + 10
    while read(server).value("octavo:ready", instance="llm_0_0", **LABELS) != 0:
        assert time.monotonic() < deadline
