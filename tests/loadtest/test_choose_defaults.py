"""`loadtest/choose_defaults.py`: what it compares, and that what it varies has an effect."""

from collections import Counter
from dataclasses import replace

import pytest

import choose_defaults
from choose_defaults import MACHINES, Choice, HeadsFirst, NewestFirst, choices, is_default, outcome, table
from octavo.config import EngineConfig
from octavo.engine.block_manager import BlockManager
from roofline import CARDS, SHAPES
from simulate import Replay
from simulation_report import Goal
from traces import TraceRequest


def test_of_each_setting_one_value_is_the_default() -> None:
    settings = Counter(choice.setting for choice in choices())
    assert Counter(choice.setting for choice in choices() if is_default(choice)) == dict.fromkeys(settings, 1)
    assert min(settings.values()) >= 3


@pytest.mark.parametrize(("manager", "hit_rate"), [(BlockManager, 0.19), (HeadsFirst, 0), (NewestFirst, 0)])
def test_the_order_of_eviction_decides_what_is_found_again(
    manager: type[BlockManager], hit_rate: float
) -> None:
    """One after the other, and every second begins like the first, in a cache for one and a half of them."""
    trace = [
        TraceRequest(second, 900, 2, prefix=0 if second % 2 == 0 else second, prefix_tokens=800)
        for second in range(40)
    ]
    config = EngineConfig("none", max_model_len=1024, seed=0)
    replay = Replay(config, CARDS["h100"], SHAPES["llama-8b"], 80, manager=manager)
    assert replay.run(trace).prefix_hit_rate == pytest.approx(hit_rate, abs=0.02)


def test_the_table_has_every_value_and_marks_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(MACHINES["H100, 8B"], speeds=(1.0,))
    monkeypatch.setattr(choose_defaults, "MACHINES", {"H100, 8B": machine})
    lines = table("watermark", 5).splitlines()
    assert lines[0] == "| setting | value | H100, 8B |"
    assert [line.split(" | ")[1] for line in lines[2:]] == ["0%", "**1%**", "2%", "5%", "10%"]
    assert all(line.endswith(" ms |") for line in lines[2:])
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_a_goal_that_nobody_reaches_is_no_goodput() -> None:
    machine = replace(MACHINES["H100, 8B"], goal=Goal(1e-6, 1e-6), speeds=(1.0,))
    found = outcome(machine, Choice("watermark", "1%"), [TraceRequest(0, 10, 2)])
    assert found.goodput_per_s == 0
    assert found.ttft_p99_s > 0
