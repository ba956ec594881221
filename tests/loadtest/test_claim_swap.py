"""The claims `swap` and `swap-engine` in short: what swaps where, and that automatic is no worse."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from claim_swap import SIMULATED, Load, Outcome, Row, real, result_of, simulated
from tiny import tiny_llama
from tiny_engine import tiny_engine

CHATS = replace(SIMULATED[1], count=6, seats=3, turns=3)


def test_on_a_fast_link_automatic_swaps_like_always() -> None:
    row = simulated(CHATS, 51.2)
    assert row.by_mode["auto"] == row.by_mode["swap"]
    assert row.by_mode["swap"].tokens_per_s > 1.3 * row.by_mode["recompute"].tokens_per_s
    assert row.by_mode["swap"].in_bytes > 0


def test_on_a_slow_link_automatic_computes_after_a_try() -> None:
    row = simulated(CHATS, 0.5)
    never, always, auto = (row.by_mode[mode] for mode in ("recompute", "swap", "auto"))
    assert never.in_bytes == never.out_bytes == auto.in_bytes == 0
    assert 0 < auto.out_bytes < always.out_bytes
    assert always.tokens_per_s < auto.tokens_per_s < never.tokens_per_s


def test_a_real_engine_swaps_and_preempts(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    make = partial(tiny_engine, tmp_path)
    chats = real(make, Load("chats", 4, 2, 60, 10, 4, turns=2), repeat=1)
    answers = real(make, Load("answers", 6, 4, 10, 6, 60), repeat=1)
    for row in (chats, answers):
        assert row.by_mode["recompute"].in_bytes == row.by_mode["recompute"].out_bytes == 0
        assert row.by_mode["swap"].out_bytes > 0
        assert all(outcome.tokens_per_s > 0 for outcome in row.by_mode.values())
    assert chats.by_mode["swap"].in_bytes > 0
    assert answers.by_mode["recompute"].preemptions > 0


def test_the_goal_is_missed_where_automatic_is_much_slower_than_either() -> None:
    def row(never: float, always: float, auto: float) -> Row:
        rates = {"recompute": never, "swap": always, "auto": auto}
        return Row("x", "y", {mode: Outcome(rate, 3, 2e9, 1e9) for mode, rate in rates.items()})  # type: ignore[misc]

    good, bad = row(1000, 2000, 1900), row(1000, 100, 890)
    assert good.share == pytest.approx(0.95)
    both = "2.00 and 1.00"
    assert good.cells() == ("x", "y", "1,000", "2,000", "1,900", "0.95", "3", both, both)
    assert result_of([good]).met
    assert not result_of([good, bad]).met
