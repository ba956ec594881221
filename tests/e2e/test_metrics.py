"""The metrics after a load whose numbers are known."""

import json

from octavo.serving.launcher import RunningServer
from triton_clients import Metrics, generate, post, wait_for_metric

LOAD = 'The same prompt for everyone, a little longer than one block of the cache so that it can be "found".'
TOTALS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
)


def test_totals_gauges_and_latencies_after_a_scripted_load(llm: RunningServer) -> None:
    before = Metrics(llm)
    hits = before.value("vllm:prefix_cache_hits_total")
    sampling = json.dumps({"max_tokens": 4, "ignore_eos": True})
    prompts = [
        generate(llm, text_input=LOAD, sampling_parameters=sampling, return_num_input_tokens=True)
        for _ in range(3)
    ]
    generate(llm, text_input=LOAD, sampling_parameters='{"temperature": 0, "stop": ["e"], "max_tokens": 40}')
    post(llm, "generate", {"text_input": LOAD, "sampling_parameters": '{"n": 0}'})
    tokens = prompts[0]["num_input_tokens"]
    reasons = {"finished_reason": "length", "model": "llm", "version": "1"}
    wait_for_metric(
        llm,
        before.value("vllm:request_success_total", **reasons) + 3,
        "vllm:request_success_total",
        **reasons,
    )
    stop = before.value("vllm:request_success_total", finished_reason="stop")
    wait_for_metric(llm, stop + 1, "vllm:request_success_total", finished_reason="stop")
    after = Metrics(llm)
    grown = {name: after.value(name, model="llm", version="1") - before.value(name) for name in TOTALS}
    assert grown["vllm:prompt_tokens_total"] == 4 * tokens
    assert grown["vllm:prefix_cache_queries_total"] == 4 * tokens
    assert 3 * 4 < grown["vllm:generation_tokens_total"] <= 3 * 4 + 40
    assert grown["vllm:time_to_first_token_seconds_count"] == 4
    assert grown["vllm:e2e_request_latency_seconds_count"] == 4
    assert grown["vllm:time_per_output_token_seconds_count"] in (3, 4)
    assert after.value("vllm:prefix_cache_hits_total") - hits >= 3 * 16
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after.value(gauge, model="llm", version="1", instance="llm_0_0") == 0
    assert after.value("octavo:ready", model="llm", version="1", instance="llm_0_0") == 1
    assert after.value("vllm:num_preemptions_total") == 0
