"""The engine as the page sees it: what is made of metrics, and who fetches them when."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from octavo_client import Metrics, Sample, Unavailable
from octavo_gateway import live
from octavo_gateway.live import Blocks, Broadcast, Model, Rate, Readings

LABELS = {"model": "llm", "version": "1"}


def metrics(instances: int = 1, **changes: float) -> Metrics:
    """Names without their prefix. The first four of `gauges` are each instance's own."""
    gauges = {
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 2.0,
        "octavo:kv_blocks": 100.0,
        "octavo:kv_blocks_used": 40.0,
        "octavo:kv_blocks_shared": 10.0,
        "octavo:kv_blocks_reusable": 25.0,
        "octavo:ready": 1.0,
    }
    counters = {
        "vllm:generation_tokens_total": 0.0,
        "vllm:prompt_tokens_total": 0.0,
        "vllm:num_preemptions_total": 4.0,
        "vllm:time_to_first_token_seconds_sum": 0.0,
        "vllm:time_to_first_token_seconds_count": 0.0,
        "vllm:request_queue_time_seconds_sum": 0.0,
        "vllm:request_queue_time_seconds_count": 0.0,
        "vllm:prefix_cache_hits_total": 0.0,
        "vllm:prefix_cache_queries_total": 0.0,
    }
    changed = {name.replace("__", ":"): value for name, value in changes.items()}
    assert changed.keys() <= gauges.keys() | counters.keys()
    samples = [Sample("nv_gpu_utilization", {}, 0.5)]
    for name, value in {**gauges, **counters, **changed}.items():
        if name in gauges:
            samples += [Sample(name, {**LABELS, "instance": f"llm_0_{i}"}, value) for i in range(instances)]
        else:
            samples.append(Sample(name, LABELS, value))
    kind = {"kv_cache_block_type": "tokens_per"}
    samples.append(Sample("nv_trt_llm_kv_cache_block_metrics", {**LABELS, "instance": "llm_0_0", **kind}, 16))
    return Metrics(tuple(samples))


def only(readings: Readings, now_s: float, seen: Metrics) -> Model:
    (model,) = readings.add(now_s, seen).models
    return model


def test_kinds_of_blocks_add_up_to_all_of_them() -> None:
    model = only(Readings(), 0, metrics())
    assert (model.name, model.version, model.ready, model.block_size) == ("llm", "1", True, 16)
    (instance,) = model.instances
    assert (instance.name, instance.running, instance.waiting) == ("llm_0_0", 3, 2)
    assert instance.blocks == Blocks(total=100, free=35, cached=25, referenced=30, shared=10)
    assert model.preemptions == 4


def test_gauges_that_were_read_at_different_moments_are_cut_to_fit() -> None:
    odd = metrics(octavo__kv_blocks_used=99, octavo__kv_blocks_reusable=60, octavo__kv_blocks_shared=100)
    (instance,) = only(Readings(), 0, odd).instances
    assert instance.blocks == Blocks(total=100, free=0, cached=1, referenced=0, shared=99)


def test_each_instance_has_its_own_blocks() -> None:
    model = only(Readings(), 0, metrics(instances=2))
    assert [instance.name for instance in model.instances] == ["llm_0_0", "llm_0_1"]
    assert [instance.blocks and instance.blocks.shared for instance in model.instances] == [10, 10]


def test_a_server_that_is_not_octavo_has_fewer_numbers() -> None:
    """Triton's vLLM backend: no instances, no blocks, no word on whether it is ready."""
    nan = Sample("vllm:num_requests_waiting", LABELS, float("nan"))
    view = Readings().add(0, Metrics((Sample("vllm:num_requests_running", LABELS, 1), nan)))
    (model,) = view.models
    assert (model.ready, model.block_size, model.first_token_s, model.prefix_hit_rate) == (None,) * 4
    assert [(i.name, i.running, i.waiting, i.blocks) for i in model.instances] == [("", 1, 0, None)]
    assert json.loads(view.to_json())["error"] is None


def test_a_rate_is_steady_though_the_counter_is_refreshed_once_a_second() -> None:
    rate = Rate()
    seen = [rate.add(half / 2, 50.0 * (half // 2)) for half in range(20)]
    assert seen[:2] == [0, 0]
    assert seen[4:] == pytest.approx([50.0] * 16)


def test_a_rate_begins_at_once_and_ends_soon_after_the_counter_stands_still() -> None:
    rate = Rate()
    for half in range(20):
        rate.add(half / 2, 100)
    assert rate.add(10, 130) == pytest.approx(30)  # in the second before it was seen
    assert rate.add(12, 130) == pytest.approx(30)
    assert rate.add(12.5, 130) == 0
    assert rate.add(13, 5) == 0  # started anew
    assert rate.add(14, 25) == pytest.approx(20)


def test_means_and_hit_rate_are_of_the_last_half_minute() -> None:
    readings = Readings()
    old = {
        "vllm__time_to_first_token_seconds_sum": 90.0,
        "vllm__time_to_first_token_seconds_count": 9.0,
        "vllm__prefix_cache_hits_total": 0.0,
        "vllm__prefix_cache_queries_total": 100.0,
    }
    first = only(readings, 0, metrics(**old))
    assert (first.first_token_s, first.queue_s, first.prefix_hit_rate) == (None, None, None)
    assert first.prefix_hit_rate_total == 0
    new = {
        "vllm__time_to_first_token_seconds_sum": 91.0,
        "vllm__time_to_first_token_seconds_count": 13.0,
        "vllm__request_queue_time_seconds_sum": 0.5,
        "vllm__request_queue_time_seconds_count": 2.0,
        "vllm__prefix_cache_hits_total": 150.0,
        "vllm__prefix_cache_queries_total": 300.0,
    }
    second = only(readings, 1, metrics(**new))
    assert (second.first_token_s, second.queue_s, second.prefix_hit_rate) == (0.25, 0.25, 0.75)
    assert second.prefix_hit_rate_total == 0.5
    for now_s in range(2, 31):
        assert only(readings, now_s, metrics(**new)).first_token_s == 0.25
    assert only(readings, 32, metrics(**new)).first_token_s is None


class Source:
    """Metrics that count how often they are fetched."""

    def __init__(self, *failures: Exception) -> None:
        self.fetched = 0
        self.failures = list(failures)

    async def __call__(self) -> Metrics:
        self.fetched += 1
        if self.failures:
            raise self.failures.pop(0)
        return metrics()


def test_metrics_are_fetched_once_for_all_and_not_at_all_for_nobody() -> None:
    source = Source()

    async def see() -> None:
        broadcast = Broadcast(source, interval_s=0.1)
        await asyncio.sleep(0.15)
        assert source.fetched == 0
        async with aclosing(broadcast.views()) as first, aclosing(broadcast.views()) as second:
            for _ in range(3):
                assert await asyncio.gather(anext(first), anext(second)) == [broadcast._latest] * 2
            assert broadcast.num_viewers == 2
            assert source.fetched == 3
        assert broadcast.num_viewers == 0
        fetched = source.fetched
        await asyncio.sleep(0.25)
        assert source.fetched == fetched
        async with aclosing(broadcast.views()) as again:
            assert json.loads(await anext(again))["models"][0]["name"] == "llm"

    asyncio.run(see())


def test_viewers_are_told_of_a_failure_and_see_what_comes_after_it(caplog: pytest.LogCaptureFixture) -> None:
    source = Source(Unavailable("no metrics at http://x: refused"), RuntimeError("a bug"))

    async def see() -> list[dict[str, Any]]:
        async with aclosing(Broadcast(source, interval_s=0.01).views()) as views:
            return [json.loads(await anext(views)) for _ in range(3)]

    refused, broken, fine = asyncio.run(see())
    assert (refused["error"], refused["models"]) == ("no metrics at http://x: refused", [])
    assert "its log says why" in broken["error"]
    assert "a bug" in caplog.text
    assert fine["error"] is None


def test_there_is_room_for_so_many_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 1)

    async def see() -> None:
        broadcast = Broadcast(Source())
        assert not broadcast.is_full
        async with aclosing(broadcast.views()) as views:
            await anext(views)
            assert broadcast.is_full
        assert not broadcast.is_full

    asyncio.run(see())
