"""The engine's numbers under vLLM's names, and a server that has no place for them."""

import time

import pytest

from fakes import FakeTriton, LoadedModel
from octavo.engine.metrics import EngineStats
from octavo.request import SamplingParams
from octavo.serving.codec import Returns
from octavo.serving.outbox import OpenRequest
from octavo.serving.reply import Reply
from octavo.serving.triton_metrics import TritonMetrics


def stats(**changes: object) -> EngineStats:
    values = {
        "num_running": 2,
        "num_waiting": 3,
        "num_blocks": 40,
        "num_used_blocks": 10,
        "num_cached_blocks": 5,
        "prompt_tokens_total": 100,
        "cached_prompt_tokens_total": 16,
        "generation_tokens_total": 50,
        "preemptions_total": 1,
        "prefix_queries_total": 80,
        "prefix_hits_total": 16,
        "requests_finished": {"stop": 4, "length": 2},
    }
    return EngineStats(**{**values, **changes})  # type: ignore[arg-type]


def make(triton: FakeTriton, instance: str = "llm_0_0") -> TritonMetrics:
    return TritonMetrics(triton.module.MetricFamily, "llm", "1", instance)


def test_gauges_and_counters_follow_the_engine(triton: FakeTriton) -> None:
    metrics = make(triton)
    metrics.update(stats(), ready=True, num_coalesced=0)
    metrics.update(
        stats(num_running=0, generation_tokens_total=70, requests_finished={"stop": 5, "abort": 1}),
        ready=False,
        num_coalesced=7,
    )
    values = {name: metric.value for (name, _), metric in triton.metrics.items() if not metric.observed}
    assert {name: values[name] for name in values if not name.endswith("seconds")} | {
        "vllm:request_success_total": 0
    } == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "octavo:ready": 0,
        "octavo:coalesced_responses_total": 7,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 70,
        "vllm:num_preemptions_total": 1,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:request_success_total": 0,
    }
    for reason, count in {"stop": 5, "length": 2, "abort": 1, "error": 0}.items():
        metric = triton.metric("vllm:request_success_total", model="llm", version="1", finished_reason=reason)
        assert metric.value == count


def test_instances_share_counters_and_have_gauges_of_their_own(triton: FakeTriton) -> None:
    for instance in ("llm_0_0", "llm_0_1"):
        make(triton, instance).update(stats(), ready=True, num_coalesced=0)
    assert triton.metric("vllm:prompt_tokens_total", model="llm", version="1").value == 200
    for instance in ("llm_0_0", "llm_0_1"):
        assert triton.metric("vllm:num_requests_running", instance=instance).value == 2


def test_latencies_of_a_request(triton: FakeTriton) -> None:
    metrics = make(triton)
    request = OpenRequest("r", None)  # type: ignore[arg-type]
    request.reply = Reply(SamplingParams(n=2), Returns(), stream=True)
    now = time.monotonic()
    request.arrived_s, request.first_token_s, request.last_token_s = now - 3, now - 2, now - 1
    request.num_tokens = 10
    metrics.observe(request)
    assert triton.metric("vllm:time_to_first_token_seconds").observed == [pytest.approx(1)]
    assert triton.metric("vllm:time_per_output_token_seconds").observed == [pytest.approx(1 / 4)]
    assert triton.metric("vllm:e2e_request_latency_seconds").observed == [pytest.approx(3, abs=0.5)]


def test_one_token_has_no_time_between_tokens_and_none_no_first(triton: FakeTriton) -> None:
    metrics = make(triton)
    request = OpenRequest("r", None)  # type: ignore[arg-type]
    request.reply = Reply(SamplingParams(), Returns(), stream=True)
    metrics.observe(request)
    request.count_tokens(1)
    metrics.observe(request)
    assert triton.metric("vllm:time_per_output_token_seconds").observed == []
    assert len(triton.metric("vllm:time_to_first_token_seconds").observed) == 1


def test_a_server_without_histograms_gets_the_rest(triton: FakeTriton) -> None:
    del triton.module.MetricFamily.HISTOGRAM
    metrics = make(triton)
    metrics.update(stats(), ready=True, num_coalesced=0)
    assert not any(name.endswith("seconds") for name, _ in triton.metrics)
    assert triton.metric("octavo:ready").value == 1


def test_a_server_without_metrics_costs_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TritonMetrics(None, "llm", "1", "llm_0_0")
    metrics.update(stats(), ready=True, num_coalesced=0)
    metrics.observe(OpenRequest("r", None))  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "no metrics of the engine: this server has no custom metrics"
    ]


def test_metrics_that_are_switched_off_cost_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class SwitchedOff:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, **arguments: str) -> None:
            raise RuntimeError("metrics are disabled")

    TritonMetrics(SwitchedOff, "llm", "1", "llm_0_0").update(stats(), ready=True, num_coalesced=0)
    assert [record.message for record in caplog.records] == ["no metrics of the engine: metrics are disabled"]


def test_a_served_request_shows_in_the_metrics(llm: LoadedModel, triton: FakeTriton) -> None:
    llm.ask(text_input="a", parameters={"max_tokens": 5}).sender.wait()
    llm.finalize()
    assert triton.metric("vllm:generation_tokens_total").value == 5
    assert triton.metric("vllm:request_success_total", finished_reason="length").value == 1
    assert len(triton.metric("vllm:e2e_request_latency_seconds").observed) == 1
    assert triton.metric("octavo:ready").value == 0
