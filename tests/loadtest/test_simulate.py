"""`loadtest/simulate.py`, on a card whose every step takes one second: reports can be told by hand."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import simulate
from octavo.config import EngineConfig
from octavo.protocol import StepPlan
from roofline import CARDS, SHAPES, Card
from simulate import Prompts, Replay, config_of, num_blocks_of, num_host_blocks_of, text_of
from simulation_report import Goal, Report, Samples
from traces import MIXED, TraceRequest, load

A_SECOND_A_STEP = Card(flops_per_s=1e30, bytes_per_s=1e30, overhead_s=1.0)
SHAPE = SHAPES["smollm2-135m"]


def replay(
    *trace: TraceRequest,
    num_blocks: int = 100,
    card: Card = A_SECOND_A_STEP,
    goal: Goal | None = None,
    **config: Any,
) -> Report:
    arguments: dict[str, Any] = {"model": "none", "max_model_len": 100, "max_num_seqs": 8, "seed": 0}
    arguments |= {"max_num_batched_tokens": 16, **config}
    return Replay(EngineConfig(**arguments), card, SHAPE, num_blocks, goal=goal).run(trace)


def same(a: Report, b: Report) -> bool:
    """But for the times of this machine."""
    return replace(a, host=[]) == replace(b, host=[])


def test_one_request_alone_by_hand() -> None:
    report = replay(TraceRequest(0, 40, 5))
    # Steps: 16, 32 and 40 tokens of the prompt, with which the first of 5 tokens comes; then one a step.
    assert report.steps == 7
    assert report.duration_s == pytest.approx(7)
    assert report.output_tokens == 5
    assert report.output_tokens_per_s == pytest.approx(5 / 7)
    assert report.prompt_tokens_per_s == pytest.approx(40 / 7)
    assert report.ttft_s == pytest.approx({"p50": 3, "p90": 3, "p99": 3})
    assert report.itl_s == pytest.approx({"p50": 1, "p90": 1, "p99": 1})
    assert report.kv_allocated == pytest.approx(3 / 100)  # all of the prompt's blocks from the start
    assert report.kv_holding == pytest.approx((16 + 32 + 40 + 41 + 42 + 43 + 44) / (7 * 48))
    assert (report.running, report.running_most, report.running_when_full) == (pytest.approx(1), 1, None)
    assert (report.requests, report.refused, report.preemptions) == (1, 0, 0)


def test_time_passes_by_steps_and_by_waiting_for_the_next_arrival() -> None:
    report = replay(TraceRequest(10, 8, 2), TraceRequest(10.5, 8, 2), TraceRequest(100, 8, 1))
    # The second arrives during the step of 10 to 11 s, runs from 11 on, and has its first token at 12.
    assert report.duration_s == pytest.approx(101)
    assert report.steps == 4
    assert report.ttft_s["p99"] == pytest.approx(1.5)
    assert report.ttft_s["p50"] == pytest.approx(1)
    assert report.running == pytest.approx((1 + 2 + 1 + 1) / 4)


def test_a_full_house_lets_others_wait() -> None:
    report = replay(*[TraceRequest(0, 4, 3)] * 6, max_num_seqs=2)
    assert report.steps == 9
    assert report.running_most == 2
    assert report.running_when_full == pytest.approx(2)
    assert report.ttft_s == pytest.approx({"p50": 4, "p90": 7, "p99": 7})


def test_equal_prefixes_are_found_in_the_cache() -> None:
    trace = [TraceRequest(second, 40, 1, prefix=7, prefix_tokens=32) for second in (0, 50)]
    report = replay(*trace)
    assert report.prefix_hit_rate == pytest.approx(32 / 80)
    assert report.ttft_s == pytest.approx({"p50": 1, "p90": 3, "p99": 3})
    assert replay(*trace, enable_prefix_caching=False).prefix_hit_rate == 0
    others = [replace(request, prefix=number) for number, request in enumerate(trace)]
    assert replay(*others).prefix_hit_rate == 0


def test_prompts_have_their_length_and_share_their_prefix_and_nothing_else() -> None:
    prompts = Prompts()
    short = prompts.make(TraceRequest(0, 20, 1, prefix=1, prefix_tokens=10))
    long = prompts.make(TraceRequest(0, 40, 1, prefix=1, prefix_tokens=30))
    again = prompts.make(TraceRequest(0, 40, 1, prefix=1, prefix_tokens=30))
    alone = prompts.make(TraceRequest(0, 40, 1))
    assert [len(prompt) for prompt in (short, long, again, alone)] == [20, 40, 40, 40]
    assert short[:10] == long[:10]
    assert long[:30] == again[:30]
    assert long[30:] != again[30:]
    assert alone[:10] != long[:10]


def test_a_small_cache_preempts_and_loses_no_token() -> None:
    report = replay(*[TraceRequest(0, 16, 60)] * 8, num_blocks=12)
    assert report.preemptions > 0
    assert report.output_tokens == 8 * 60
    assert report.kv_allocated_most == 1
    assert report.itl_s["p99"] > report.itl_s["p50"] == pytest.approx(1)


def test_blocks_that_are_swapped_take_their_time_on_the_link() -> None:
    trace = [TraceRequest(0, 80, 1, prefix=number % 2, prefix_tokens=80) for number in range(4)]
    card = replace(A_SECOND_A_STEP, link_bytes_per_s=SHAPE.kv_bytes_per_token * 16)  # a second a block
    plans: list[StepPlan] = []
    arguments: dict[str, Any] = {"max_model_len": 100, "max_num_seqs": 1, "preemption_mode": "swap"}
    replayed = Replay(
        EngineConfig("none", seed=0, **arguments), card, SHAPE, 7, on_step=plans.append, num_host_blocks=20
    )
    report = replayed.run(trace)
    num_swaps = sum(len(plan.swaps_out) + len(plan.swaps_in) for plan in plans)
    assert num_swaps > 8
    assert report.duration_s == pytest.approx(report.steps + num_swaps)
    with pytest.raises(ValueError, match="no 'link_bytes_per_s', and blocks are swapped"):
        Replay(EngineConfig("none", seed=0, **arguments), A_SECOND_A_STEP, SHAPE, 7, num_host_blocks=20).run(
            trace
        )


def test_what_is_too_long_is_refused_and_what_would_be_is_cut() -> None:
    report = replay(TraceRequest(0, 100, 1), TraceRequest(0, 90, 50))
    assert (report.requests, report.refused, report.output_tokens) == (2, 1, 10)


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 6 blocks of 16 tokens, less than one sequence of 100 tokens"):
        replay(TraceRequest(0, 1, 1), num_blocks=6)


def test_a_trace_gives_the_same_report_each_time_and_every_step_its_host_time() -> None:
    trace = load(MIXED)[:100]
    card = CARDS["h100"]
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_blocks": 2000}
    plans: list[StepPlan] = []
    arguments = EngineConfig("none", max_model_len=2048, max_num_seqs=8, seed=0)
    first = Replay(arguments, card, SHAPE, 2000, on_step=plans.append).run(trace)
    assert same(first, replay(*trace, card=card, **settings))
    assert first.output_tokens == sum(request.output_tokens for request in trace)
    assert len(plans) == first.steps == sum(band.steps for band in first.host)
    sizes = [len(plan.slices) for plan in plans]
    assert first.host[-1].most_sequences == max(sizes) == first.running_most
    assert [band.least_sequences for band in first.host] == [1, 2, 4, 8]
    for band in first.host:
        assert 0 < band.median_ms <= band.p99_ms
        assert sum(band.parts_ms.values()) > 0
    assert "host time of a step on this machine" in text_of(first)


def test_samples_count_each_number_as_often_as_it_came() -> None:
    samples = Samples()
    assert samples.quantile(0.5) == 0
    values = [5.0] * 90 + [7.0] * 9 + [9.0]
    for value, group in itertools.groupby(reversed(values)):
        samples.add(value, len(list(group)))
    assert [samples.quantile(share) for share in (0.5, 0.9, 0.91, 0.99, 1)] == [5, 5, 7, 7, 9]


def test_samples_take_no_more_room_for_more_of_them() -> None:
    samples = Samples()
    for number in range(100_000):
        samples.add(0.01 + number / 1e7)
    assert len(samples._counts) <= 1001  # 0.01 to 0.02, to four digits
    assert samples.quantile(0.5) == pytest.approx(0.015, rel=1e-3)


def test_goodput_is_of_requests_that_reach_the_goal() -> None:
    """Two run at once; the others wait for them, and have their first token in time or not."""
    trace = [
        TraceRequest(0, 4, 3)
    ] * 6  # first tokens come after 1, 4 and 7 s, the others each a second later
    assert replay(*trace, max_num_seqs=2).goodput_per_s == 0
    for ttft_s, itl_s, good in ((1, 1, 2), (3.9, 1, 2), (4, 1, 4), (7, 1, 6), (7, 0.9, 0)):
        report = replay(*trace, max_num_seqs=2, goal=Goal(ttft_s, itl_s))
        assert report.goodput_per_s == pytest.approx(good / 9), (ttft_s, itl_s)
    alone = replay(TraceRequest(0, 4, 1), goal=Goal(1, 0))
    assert alone.goodput_per_s == pytest.approx(1)


def test_what_is_counted_of_a_sequence_is_forgotten_with_it() -> None:
    arguments: dict[str, Any] = {"max_model_len": 100, "max_num_seqs": 8, "seed": 0}
    run = Replay(EngineConfig("none", **arguments), A_SECOND_A_STEP, SHAPE, 100)
    run.run([TraceRequest(number, 20, 5) for number in range(50)])
    tally = run._tally
    assert not tally._arrived
    assert not tally._token_s
    assert not tally._due_s
    assert len(tally._table_blocks) <= 1  # the last one's: no plan came after it


def test_the_cache_is_as_large_as_the_configuration_or_the_card_has_it() -> None:
    shape = SHAPES["llama-8b"]
    block_bytes = 16 * 2 * 32 * 8 * 128 * 2
    sized = config_of('{"kv_cache_memory_bytes": 20971530}')
    assert num_blocks_of(sized, A_SECOND_A_STEP, shape) == 20971530 // block_bytes == 10
    left_bytes = 0.5 * 80e9 - shape.weight_bytes
    half = config_of('{"gpu_memory_utilization": 0.5}')
    assert num_blocks_of(half, CARDS["h100"], shape) == int(left_bytes / block_bytes)
    with pytest.raises(ValueError, match="no 'memory_bytes'; set kv_cache_memory_bytes"):
        num_blocks_of(half, A_SECOND_A_STEP, shape)


def test_host_blocks_are_what_the_engine_would_have() -> None:
    shape, h100 = SHAPES["llama-8b"], CARDS["h100"]
    block_bytes = shape.kv_bytes_per_token * 16
    assert num_host_blocks_of(config_of("{}"), h100, shape) == 4 * 2**30 // block_bytes
    assert num_host_blocks_of(config_of("{}"), A_SECOND_A_STEP, shape) == 0
    assert num_host_blocks_of(config_of('{"swap_space": 0.5}'), h100, shape) == 2**29 // block_bytes
    for without in ({"swap_space": 0}, {"preemption_mode": "recompute"}, {"enable_prefix_caching": False}):
        assert num_host_blocks_of(config_of(json.dumps(without)), h100, shape) == 0
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        num_host_blocks_of(config_of('{"swap_space": 1}'), A_SECOND_A_STEP, shape)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["simulate", "--limit", "10", *arguments])
        simulate.main()
        return capsys.readouterr().out

    report = json.loads(run("--json", "--speed", "1000"))
    assert report["requests"] == 10
    assert report["running_most"] == 10
    assert set(report) == set(asdict(replay(TraceRequest(0, 1, 1))))
    file = tmp_path / "model.json"
    file.write_text('{"model": "somewhere", "num_gpu_blocks_override": 16, "max_model_len": 250}')
    refused = sum(request.prompt_tokens > 249 for request in load(MIXED)[:10])
    shown = run("--engine", str(file), "--model", "smollm2-135m", "--card", "l4")
    assert f"10 requests ({refused} refused)" in shown
    for wrong, message in {
        ("--card", "abacus"): "'abacus' is neither a file nor one of",
        ("--engine", '{"kv_cache_memory_bytes": 10000000}'): "holds 4 blocks of 16 tokens, less than one",
        ("--engine", '{"max_num_seq": 8}'): "unknown engine argument 'max_num_seq'",
        ("--engine", "[]"): "[]",
        ("--engine", '{"block_size": 0}'): "'block_size' is 0",
        ("--trace", "nowhere.jsonl"): "nowhere.jsonl",
    }.items():
        with pytest.raises(SystemExit):
            run(*wrong)
        assert message in capsys.readouterr().err
