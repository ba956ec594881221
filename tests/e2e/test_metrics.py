"""The metrics after a load whose numbers are known."""

import json
import time

from octavo.serving.launcher import RunningServer
from triton_clients import Metrics, generate, post

LOAD = 'The same prompt for everyone, a little longer than one block of the cache so that it can be "found".'
TOTALS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
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
    }
    finished = {
        reason: after.value("vllm:request_success_total", finished_reason=reason, **LABELS)
        - before.value("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 1, "length": 3, "abort": 0, "error": 0}
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after.value(gauge, instance="llm_0_0", **LABELS) == 0
    assert after.value("octavo:ready", instance="llm_0_0", **LABELS) == 1
    assert after.value("vllm:num_preemptions_total") == 0
