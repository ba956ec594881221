"""Waiting for what another thread or process is about to do."""

import time
from collections.abc import Callable
from typing import Any


def comes_true(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Whether it held at some time before so long had passed."""
    deadline_s = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return bool(holds)


def wait_until(condition: Callable[[], Any], what: str = "", timeout_s: float = 5.0) -> None:
    """`what` to say when it does not come true."""
    assert comes_true(condition, timeout_s), what
