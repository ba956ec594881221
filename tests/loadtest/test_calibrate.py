"""`loadtest/calibrate.py` on the tiny model: the simulator takes the very steps that the engine takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibrate import PREDICTED, StepsDiffer, calibrate, measure, shape_of, simulate
from octavo import Engine
from roofline import Card
from tiny import tiny_llama
from tiny_engine import tiny_engine, whole
from traces import TraceRequest

FITTED = tuple(TraceRequest(0, 5 + 11 * (7 * i % 10), 4 + 10 * (3 * i % 10)) for i in range(10))
WORKS = {"many": (TraceRequest(0, 16, 6),) * 4, "one": (TraceRequest(0, 90, 3),)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path)
    return path


def engine_of(folder: Path) -> Engine:
    return tiny_engine(
        folder,
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=20,  # so that some are preempted too
    )


def test_a_workload_of_the_engine_calibrates_and_others_are_predicted(folder: Path) -> None:
    with whole(engine_of(folder)) as engine:
        card, told = calibrate(engine, FITTED, WORKS, turns=2)
        assert engine.stats().preemptions_total > 0
    assert card.flops_per_s > 0
    assert card.bytes_per_s > 0
    assert card.overhead_s >= 0
    assert [row.work for row in told] == ["fitted", "many", "one"]
    for row in told:
        assert row.measured > 0
        assert row.predicted > 0
        assert row.off == pytest.approx(row.predicted / row.measured - 1)


def test_steps_that_are_not_the_engines_are_seen(folder: Path) -> None:
    with whole(engine_of(folder)) as engine:
        measured = measure(engine, WORKS["many"], turns=1)
        card = Card(1e12, 1e12, 0.001)
        assert measured.output_tokens == 4 * 6
        assert measured.sizes[0] == (64, 4)
        assert len(measured.step_s) == len(measured.sizes) == 6
        rate, works = simulate(engine, card, WORKS["many"], measured)
        assert rate == pytest.approx(24 / (6 * 0.001), rel=0.01)
        assert len(works) == 6
        assert works[0].linear_bytes == shape_of(engine).weight_bytes
        other = replace(measured, sizes=[(63, 4), *measured.sizes[1:]])
        with pytest.raises(StepsDiffer, match="the engine took 6 steps and the simulator 6"):
            simulate(engine, card, WORKS["many"], other)


def test_three_workloads_are_predicted() -> None:
    assert len(PREDICTED) == 3
