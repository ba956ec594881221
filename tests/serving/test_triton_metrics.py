"""The engine's numbers under vLLM's names, and a server that has no place for them."""

import itertools
import logging
import threading
import time

import pytest

from fakes import FakeTriton, Load, LoadedModel
from octavo.engine.metrics import EngineStats, Step
from octavo.errors import InvalidArgument, OctavoError, Unavailable
from octavo.request import RequestStats, SamplingParams, TextDelta
from octavo.serving.codec import Returns
from octavo.serving.ended_request import EndedRequest
from octavo.serving.metric_tables import REQUEST_HISTOGRAMS, STEP_HISTOGRAMS
from octavo.serving.outbox import OpenRequest
from octavo.serving.reply import Reply
from octavo.serving.reporting_thread import ReportingThread
from octavo.serving.triton_metrics import TritonMetrics


def stats(**changes: object) -> EngineStats:
    values = {
        "num_running": 2,
        "num_waiting": 3,
        "num_blocks": 40,
        "num_used_blocks": 10,
        "num_cached_blocks": 5,
        "num_reusable_blocks": 4,
        "num_shared_blocks": 3,
        "block_size": 16,
        "prompt_tokens_total": 100,
        "cached_prompt_tokens_total": 16,
        "generation_tokens_total": 50,
        "preemptions_total": 1,
        "prefix_queries_total": 80,
        "prefix_hits_total": 16,
        "block_copies_total": 6,
        "steps_total": 9,
        "step_s_total": 0.5,
        "forward_s_total": 0.25,
        "sample_s_total": 0.125,
        "requests_finished": {"stop": 4, "length": 2},
        "num_host_blocks": 8,
        "num_used_host_blocks": 3,
        "host_hits_total": 12,
        "swapped_out_bytes_total": 4096,
        "swapped_in_bytes_total": 2048,
        "disk_hits_total": 8,
        "disk_loaded_bytes_total": 800,
        "disk_saved_bytes_total": 1600,
        "disk_dropped_blocks_total": 7,
        "disk_damaged_files_total": 1,
    }
    return EngineStats(**{**values, **changes})  # type: ignore[arg-type]


def make(triton: FakeTriton, instance: str = "llm_0_0") -> TritonMetrics:
    return TritonMetrics(triton.module.MetricFamily, "llm", "1", instance)


def ended(request: OpenRequest, error: OctavoError | None = None) -> EndedRequest:
    return EndedRequest(request, error, time.monotonic())


def test_gauges_and_counters_follow_the_engine(triton: FakeTriton) -> None:
    metrics = make(triton)
    metrics.update(stats(), ready=True, num_coalesced=0)
    metrics.update(
        stats(num_running=0, generation_tokens_total=70, requests_finished={"stop": 5, "abort": 1}),
        ready=False,
        num_coalesced=7,
    )
    values = {
        name: metric.value
        for (name, labels), metric in triton.metrics.items()
        if {label for label, _ in labels} <= {"model", "version", "instance"} and not metric.observed
    }
    histograms = {series.name for series in (*REQUEST_HISTOGRAMS, *STEP_HISTOGRAMS)}
    assert {name: value for name, value in values.items() if name not in histograms} == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "octavo:host_blocks": 8,
        "octavo:host_blocks_used": 3,
        "octavo:prefix_cache_host_hits_total": 12,
        "octavo:swap_out_bytes_total": 4096,
        "octavo:swap_in_bytes_total": 2048,
        "octavo:kv_blocks": 40,
        "octavo:kv_blocks_used": 10,
        "octavo:kv_blocks_cached": 5,
        "octavo:kv_blocks_reusable": 4,
        "octavo:kv_blocks_shared": 3,
        "octavo:prefix_cache_hit_rate": 0.2,
        "octavo:ready": 0,
        "octavo:coalesced_responses_total": 7,
        "octavo:steps_total": 9,
        "octavo:step_seconds_total": 0.5,
        "octavo:forward_seconds_total": 0.25,
        "octavo:sampling_seconds_total": 0.125,
        "octavo:preemptions_total": 1,
        "octavo:block_copies_total": 6,
        "octavo:prefix_cache_disk_hits_total": 8,
        "octavo:disk_load_bytes_total": 800,
        "octavo:disk_save_bytes_total": 1600,
        "octavo:disk_dropped_blocks_total": 7,
        "octavo:disk_damaged_files_total": 1,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 70,
        "vllm:num_preemptions_total": 1,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 16,
    }
    for reason, count in {"stop": 5, "length": 2, "abort": 1, "error": 0}.items():
        for name in ("vllm:request_success_total", "octavo:finished_requests_total"):
            metric = triton.metric(name, model="llm", version="1", finished_reason=reason)
            assert metric.value == count


def test_errors_are_counted_by_code_and_by_whether_the_engine_had_the_request(triton: FakeTriton) -> None:
    metrics = make(triton)

    def end(error: OctavoError, *, taken: bool) -> None:
        request = OpenRequest("r", None)  # type: ignore[arg-type]
        if taken:
            request.hand_over(lambda: None)
        metrics.observe(ended(request, error))

    end(InvalidArgument("x"), taken=False)
    metrics.update(stats(), ready=True, num_coalesced=0)
    end(InvalidArgument("x"), taken=False)
    end(Unavailable("full"), taken=False)
    end(Unavailable("late"), taken=True)
    metrics.update(stats(), ready=True, num_coalesced=0)
    found = {
        (name.removeprefix("octavo:"), dict(labels)["code"]): metric.value
        for (name, labels), metric in triton.metrics.items()
        if "code" in dict(labels) and metric.value
    }
    assert found == {
        ("refused_requests_total", "INVALID_ARG"): 2,
        ("refused_requests_total", "UNAVAILABLE"): 1,
        ("failed_requests_total", "UNAVAILABLE"): 1,
    }
    assert triton.metric("vllm:time_to_first_token_seconds").observed == []


def test_every_code_of_an_error_has_a_series(triton: FakeTriton) -> None:
    make(triton)
    kinds, codes = [OctavoError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        codes.add(kind.code)
    for name in ("octavo:refused_requests_total", "octavo:failed_requests_total"):
        assert {dict(labels)["code"] for n, labels in triton.metrics if n == name} == codes


def test_buckets_suit_a_gpu_and_a_large_model_on_a_cpu() -> None:
    """What is measured, in seconds, lies between the ends; neighbours are a factor of five apart at most."""
    ranges = {
        "vllm:time_to_first_token_seconds": (0.005, 100),
        "vllm:time_per_output_token_seconds": (0.002, 3),
        "vllm:e2e_request_latency_seconds": (0.02, 1000),
        "octavo:queue_time_seconds": (0.002, 300),
        "octavo:step_time_seconds": (0.0005, 20),
    }
    buckets = {series.name: series.buckets for series in (*REQUEST_HISTOGRAMS, *STEP_HISTOGRAMS)}
    for name, (least, most) in ranges.items():
        assert buckets[name][0] <= least < most <= buckets[name][-1]
        assert max(high / low for low, high in itertools.pairwise(buckets[name])) <= 5, name


def test_load_balancers_find_blocks_and_queue_by_the_names_they_know(triton: FakeTriton) -> None:
    make(triton).update(stats(), ready=True, num_coalesced=0)
    blocks = {"max": 40, "used": 10, "free": 30, "tokens_per": 16, "fraction": 0.25}
    for kind, value in blocks.items():
        metric = triton.metric(
            "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind, model="llm", version="1"
        )
        assert metric.value == value
    for kind, value in {"waiting": 3, "scheduled": 2}.items():
        metric = triton.metric("nv_trt_llm_request_metrics", request_type=kind, model="llm", version="1")
        assert metric.value == value


def test_steps_are_observed_and_of_many_a_sample(triton: FakeTriton) -> None:
    metrics = make(triton)
    metrics.update(stats(), True, 0, [Step(0.25, 7, 1), Step(0.5, 3, 3)])
    assert triton.metric("octavo:step_time_seconds", model="llm").observed == [0.25, 0.5]
    assert triton.metric("vllm:iteration_tokens_total", version="1").observed == [7, 3]
    assert triton.metric("octavo:batch_size").observed == [1, 3]
    metrics.update(stats(), True, 0, [Step(1, number, 1) for number in range(1000)])
    sampled = triton.metric("vllm:iteration_tokens_total").observed[2:]
    assert sampled == list(range(9, 1000, 10))


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
    metrics.observe(ended(request))
    assert triton.metric("vllm:time_to_first_token_seconds").observed == [pytest.approx(1)]
    assert triton.metric("vllm:time_per_output_token_seconds").observed == [pytest.approx(1 / 4)]
    assert triton.metric("vllm:e2e_request_latency_seconds").observed == [pytest.approx(3, abs=0.5)]
    assert triton.metric("vllm:request_generation_tokens").observed == [10]
    assert triton.metric("vllm:request_params_n").observed == [2]
    assert triton.metric("vllm:request_queue_time_seconds").observed == [], "nobody measured it"


def test_where_a_requests_time_went_and_what_it_asked_for(triton: FakeTriton) -> None:
    metrics = make(triton)
    request = OpenRequest("r", None)  # type: ignore[arg-type]
    request.reply = Reply(SamplingParams(n=2, best_of=3, max_tokens=40), Returns(), stream=True)
    times = RequestStats(queue_s=0.5, prefill_s=1.0, decode_s=2.0, cached_prompt_tokens=0, preemptions=0)
    request.reply.add(TextDelta("r", num_prompt_tokens=12, stats=times, request_finished=True))
    request.count_tokens(1)
    metrics.observe(ended(request))
    expected = {
        "vllm:request_queue_time_seconds": 0.5,
        "octavo:queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 1.0,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:request_inference_time_seconds": 3.0,
        "vllm:request_prompt_tokens": 12,
        "vllm:request_params_n": 2,
        "vllm:request_params_best_of": 3,
        "vllm:request_params_max_tokens": 40,
    }
    assert {name: triton.metric(name).observed for name in expected} == {
        name: [value] for name, value in expected.items()
    }


def test_one_token_has_no_time_between_tokens_and_none_no_first(triton: FakeTriton) -> None:
    metrics = make(triton)
    request = OpenRequest("r", None)  # type: ignore[arg-type]
    request.reply = Reply(SamplingParams(), Returns(), stream=True)
    metrics.observe(ended(request))
    request.count_tokens(1)
    metrics.observe(ended(request))
    assert triton.metric("vllm:time_per_output_token_seconds").observed == []
    assert len(triton.metric("vllm:time_to_first_token_seconds").observed) == 1


def test_a_server_without_histograms_gets_the_rest(triton: FakeTriton) -> None:
    del triton.module.MetricFamily.HISTOGRAM
    metrics = make(triton)
    metrics.update(stats(), ready=True, num_coalesced=0)
    assert not any("_seconds" in name and "total" not in name for name, _ in triton.metrics)
    assert triton.metric("octavo:ready").value == 1


def test_a_server_without_metrics_costs_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TritonMetrics(None, "llm", "1", "llm_0_0")
    metrics.update(stats(), ready=True, num_coalesced=0)
    metrics.observe(ended(OpenRequest("r", None)))  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "no metrics of the engine: this server has no custom metrics"
    ]


def test_metrics_that_the_operator_does_not_want_cost_one_log_line(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="octavo"):
        metrics = TritonMetrics(triton.module.MetricFamily, "llm", "1", "llm_0_0", off="a switch")
    metrics.update(stats(), ready=True, num_coalesced=0)
    assert [record.message for record in caplog.records] == ["no metrics of the engine: a switch says so"]
    assert triton.metrics == {}


def test_what_is_put_is_written_in_order_and_a_failure_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread, written = ReportingThread(), []
    thread.put(lambda: written.append(1))
    thread.put(lambda: 1 / 0)
    thread.put(lambda: written.append(threading.current_thread().name))
    thread.start()
    thread.stop(5)
    assert written == [1, "octavo-reporting"]
    assert [record.message for record in caplog.records] == [
        "a metric, a log line or a span could not be written"
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


def test_disable_log_stats_switches_them_off(load: Load, triton: FakeTriton) -> None:
    llm = load({"model": "m.gguf", "disable_log_stats": "true"})
    llm.ask(text_input="a", parameters={"max_tokens": 5}).sender.wait()
    llm.finalize()
    assert triton.metrics == {}
    assert "no metrics of the engine: 'disable_log_stats' in model.json says so" in triton.log()
