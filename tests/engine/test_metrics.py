"""The log of steps: what it adds up, and what it forgets."""

import time

from octavo.engine import metrics
from octavo.engine.metrics import StepLog


def test_steps_are_measured_handed_out_once_and_added_up() -> None:
    steps = StepLog()
    assert steps.running_s() == 0
    for num_tokens in (7, 1):
        steps.begin(num_tokens, 1)
        time.sleep(0.005)
        assert steps.running_s() >= 0.005
        steps.end()
        steps.note_parts(0.003, 0.001)
    assert steps.running_s() == 0
    assert (steps.forward_s, steps.sample_s) == (0.006, 0.002)
    taken = steps.take()
    assert [(step.num_tokens, step.num_sequences) for step in taken] == [(7, 1), (1, 1)]
    assert all(step.duration_s >= 0.005 for step in taken)
    assert steps.take() == []
    assert steps.num_steps == 2
    assert steps.duration_s == sum(step.duration_s for step in taken)


def test_steps_that_nobody_takes_do_not_pile_up() -> None:
    steps = StepLog()
    for _ in range(metrics._MOST_STEPS + 5):
        steps.begin(1, 1)
        steps.end()
    assert len(steps.take()) == metrics._MOST_STEPS
    assert steps.num_steps == metrics._MOST_STEPS + 5
