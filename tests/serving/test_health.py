"""Whether a model can take work: what heals by itself, what does not, and what the log says of it."""

import logging
import time

import pytest

from octavo.engine.metrics import StepLog
from octavo.errors import OctavoError
from octavo.serving.health import Health


class FakeLoop:
    failure: OctavoError | None = None


def make(stalled_s: float = 0.01) -> tuple[Health, FakeLoop, StepLog]:
    loop, steps = FakeLoop(), StepLog()
    return Health(loop, steps, stalled_s), loop, steps  # type: ignore[arg-type]


def test_a_step_that_hangs_makes_the_model_not_ready_until_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health, _, steps = make()
    with caplog.at_level(logging.INFO, logger="octavo"):
        health.watch()
        assert health.problem() is None
        steps.begin(1, 1)
        time.sleep(0.02)
        assert health.problem() == "a step has been running for more than 0.01 s"
        health.watch()
        health.watch()
        steps.end()
        assert health.problem() is None
        health.watch()
    assert [record.message for record in caplog.records] == [
        "not ready: a step has been running for more than 0.01 s",
        "ready again",
    ]
    assert not health.failed


def test_an_engine_that_has_failed_says_why_for_good() -> None:
    health, loop, _ = make()
    loop.failure = OctavoError("the engine has failed")
    assert health.failed
    assert health.problem() == "the engine has failed"


def test_a_model_that_is_unloaded_takes_no_work() -> None:
    health, _, _ = make()
    health.drain()
    assert health.problem() == "it is being unloaded"
    assert not health.failed
