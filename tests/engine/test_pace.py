"""The token budget that keeps steps near a target: what it learns from the steps' times, and how soon."""

from collections.abc import Callable
from random import Random

import pytest

from octavo.engine.pace import Pace
from octavo.protocol import StepPlan, StepResult
from scheduling import Run
from simulated import SimulatedExecutor


def line(base_s: float, slope_s: float) -> Callable[[int], float]:
    return lambda num_tokens: base_s + slope_s * num_tokens


def follow(pace: Pace, time_of: Callable[[int], float], num_steps: int, *, noise: float = 0.0) -> list[int]:
    """Every other step has a prompt that fills the budget, the others only 20 sequences that decode."""
    source = Random(0)
    budgets = []
    for number in range(num_steps):
        num_tokens = pace.budget if number % 2 else 20
        pace.note(num_tokens, time_of(num_tokens) * source.uniform(1 - noise, 1 + noise))
        budgets.append(pace.budget)
    return budgets


@pytest.mark.parametrize(
    ("base_s", "slope_s", "target_s", "fitting"),
    [(0.020, 0.0003, 0.050, 100), (0.005, 0.00001, 0.020, 1500), (0.0, 0.0002, 0.1, 500)],
)
def test_the_budget_is_what_takes_the_target(
    base_s: float, slope_s: float, target_s: float, fitting: int
) -> None:
    pace = Pace(target_s, least_tokens=32, most_tokens=4096)
    assert pace.budget == 32
    exact = follow(pace, line(base_s, slope_s), 20)
    assert all(budget <= fitting for budget in exact)  # it comes from below
    assert exact[-1] == pytest.approx(fitting, abs=1)
    noisy = Pace(target_s, 32, 4096)
    assert all(
        budget == pytest.approx(fitting, rel=0.3)
        for budget in follow(noisy, line(base_s, slope_s), 400, noise=0.2)[50:]
    )


def test_it_follows_a_machine_that_becomes_slower_or_faster() -> None:
    pace = Pace(0.1, 16, 4096)
    follow(pace, line(0.02, 0.0001), 40)
    assert pace.budget == pytest.approx(800, abs=1)
    follow(pace, line(0.02, 0.0004), 60)
    assert pace.budget == pytest.approx(200, rel=0.1)
    follow(pace, line(0.02, 0.0001), 60)
    assert pace.budget == pytest.approx(800, rel=0.1)


def test_decode_steps_do_not_wash_out_what_a_prompt_takes() -> None:
    pace = Pace(0.1, 16, 4096)
    follow(pace, line(0.02, 0.0001), 40)
    for _ in range(20_000):
        pace.note(20, 0.022)
    assert pace.budget == pytest.approx(800, rel=0.01)


def test_one_step_that_hung_is_forgotten() -> None:
    pace = Pace(0.1, 16, 4096)
    follow(pace, line(0.02, 0.0001), 40)
    pace.note(pace.budget, 5.0)
    follow(pace, line(0.02, 0.0001), 60)
    assert pace.budget == pytest.approx(800, rel=0.05)


def test_it_stays_within_its_bounds() -> None:
    slow, fast, flat = (Pace(0.01, 16, 64) for _ in range(3))
    assert follow(slow, line(0.02, 0.001), 10)[-1] == 16
    assert follow(fast, line(0.0001, 0.000001), 10)[-1] == 64
    assert follow(flat, line(0.005, 0.0), 10)[-1] == 64
    late = Pace(0.01, 16, 64)
    assert follow(late, line(0.02, 0.0), 10)[-1] == 16


def test_a_step_without_a_time_says_nothing() -> None:
    pace = Pace(0.1, 16, 4096)
    pace.note(16, 0.0)
    assert pace.budget == 16
    assert follow(pace, line(0.02, 0.0001), 40)[-1] == pytest.approx(800, abs=1)


class TimedExecutor(SimulatedExecutor):
    """Its steps take 2 ms and half a millisecond a token, by its own account."""

    times_s: list[float]

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        assert self._result is not None
        self.times_s.append(0.002 + 0.0005 * plan.num_tokens)
        self._result = StepResult(
            plan.step_id, self._result.sequences, forward_s=self.times_s[-1] - 0.001, sample_s=0.001
        )


def test_a_long_prompt_is_computed_in_chunks_that_keep_the_others_at_the_target() -> None:
    run = Run(num_blocks=200, max_model_len=400, max_num_batched_tokens=300, max_num_seqs=4, target_itl_ms=20)
    timed = run.executor = TimedExecutor(200, 4)
    timed.times_s = []
    run.add([1, 2], max_tokens=60)
    for _ in range(5):
        run.step()
    run.add(list(range(50)) * 6, max_tokens=5)
    run.drain()
    run.check()
    assert max(timed.times_s) < 0.021
    assert sum(plan.num_tokens in (35, 36) for plan in run.plans) >= 8
    unlimited = Run(num_blocks=200, max_model_len=400, max_num_batched_tokens=300, max_num_seqs=4)
    unlimited.add([1, 2], max_tokens=60)
    unlimited.add(list(range(50)) * 6, max_tokens=5)
    unlimited.drain()
    assert unlimited.tokens == run.tokens
