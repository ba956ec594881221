"""Whether copying blocks pays: what it is decided by, and how soon that is known."""

from dataclasses import replace
from typing import Any

import pytest

from octavo.engine.step_times import StepTimes
from octavo.engine.swap_choice import SwapChoice
from octavo.protocol import StepPlan
from scheduling import Run


def taught(mode: Any, *, token_s: float, copy_s: float) -> SwapChoice:
    """By steps of 20 and of 1000 tokens, 10 ms and `token_s` for each, and by a copy of 10 blocks."""
    times = StepTimes()
    choice = SwapChoice(mode, 16, times)
    for _ in range(20):
        for num_tokens in (20, 1000):
            times.note(num_tokens, 0.010 + token_s * num_tokens)
    choice.note(10, 10 * copy_s)
    choice.open()
    return choice


@pytest.mark.parametrize(
    ("copy_s", "out", "back"), [(700e-6, True, True), (900e-6, False, True), (1700e-6, False, False)]
)
def test_copies_pay_where_they_take_less_than_computing_does(copy_s: float, out: bool, back: bool) -> None:
    choice = taught("auto", token_s=100e-6, copy_s=copy_s)  # a block takes 1.6 ms to compute
    assert (choice.out_pays(), choice.in_pays()) == (out, back)


def test_one_copy_that_was_interrupted_changes_nothing() -> None:
    choice = taught("auto", token_s=100e-6, copy_s=50e-6)
    choice.note(1, 1.0)
    choice.open()
    assert choice.out_pays()
    for _ in range(2):
        choice.note(1, 1.0)
    choice.open()
    assert not choice.in_pays()  # that is what the link has become


def test_the_other_modes_do_not_ask() -> None:
    for copy_s in (0.0, 10.0):
        swap, recompute = (taught(mode, token_s=1e-4, copy_s=copy_s) for mode in ("swap", "recompute"))
        assert swap.out_pays()
        assert swap.in_pays()
        assert not recompute.out_pays()
        assert not recompute.in_pays()


def test_what_is_not_known_is_tried() -> None:
    times = StepTimes()
    choice = SwapChoice("auto", 16, times)
    assert choice.out_pays()
    times.note(100, 0.1)
    choice.open()
    assert choice.out_pays()
    choice.note(1, 1.0)
    choice.open()
    assert not choice.out_pays()


def test_a_verdict_holds_for_a_step_and_is_tried_anew_after_many_without_a_copy() -> None:
    times = StepTimes()
    choice = SwapChoice("auto", 16, times)
    verdicts = []
    for _ in range(1100):
        choice.open()
        verdicts.append(choice.out_pays())
        if verdicts[-1]:
            choice.note(1, 5.0)
        assert choice.out_pays() == verdicts[-1]
        times.note(100, 0.1)
    tried = [number for number, verdict in enumerate(verdicts) if verdict]
    assert tried == [0, 500, 1000]


class SlowLink(Run):
    """Steps take 1 ms a token, and copies `copy_s` a block."""

    copy_s: float

    def update(self, plan: StepPlan, result: Any) -> None:
        swap_s = self.copy_s * (len(plan.swaps_out) + len(plan.swaps_in))
        super().update(plan, replace(result, forward_s=1e-3 * plan.num_tokens, swap_s=swap_s))


@pytest.mark.parametrize(("copy_s", "swaps"), [(0.5e-3, True), (50e-3, False)])
def test_a_scheduler_copies_on_a_fast_link_and_stops_on_a_slow_one(copy_s: float, swaps: bool) -> None:
    run = SlowLink(num_blocks=12, num_host_blocks=60)
    run.copy_s = copy_s
    prompts = [[number] * 30 for number in range(5)]
    for _ in range(8):
        for prompt in prompts:
            run.add(prompt, max_tokens=1)
            run.drain()
    run.check()
    moved = [len(plan.swaps_out) + len(plan.swaps_in) for plan in run.plans]
    if swaps:
        assert sum(moved) >= 7 * 5 * 6  # a turn brings all prompts in, but for what the device still has
        assert run.blocks.host.num_swapped_out <= 5 * 7
    else:
        assert sum(map(bool, moved)) == 1
