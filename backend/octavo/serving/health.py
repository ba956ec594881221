"""Whether a model can take work, and if not, why. Made by `tritonserver`, which answers Triton with it.

What heals: a step that takes too long is over some time, and the model is ready again by itself. What does
not: an engine whose own state is not trusted any more. Then its model has to be loaded anew.
"""

import logging
import threading

from octavo.engine.loop import EngineLoop
from octavo.engine.metrics import StepLog

log = logging.getLogger("octavo")

STALLED_S = 60.0  # a step of so long is no step any more: a device that hangs, a machine out of memory


class Health:
    """Any thread may ask; one thread `watch`es."""

    def __init__(self, loop: EngineLoop, steps: StepLog, stalled_s: float = STALLED_S) -> None:
        self._loop = loop
        self._steps = steps
        self._stalled_s = stalled_s
        self._draining = threading.Event()
        self._said: str | None = None

    def drain(self) -> None:
        """From now on the model takes no work, for good."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    @property
    def failed(self) -> bool:
        """Whether only loading the model anew can help."""
        return self._loop.failure is not None

    def problem(self) -> str | None:
        """Why no request should be sent here now; None while all is well."""
        if self.draining:
            return "it is being unloaded"
        failure = self._loop.failure
        if failure is not None:
            return str(failure)
        running_s = self._steps.running_s()
        if running_s > self._stalled_s:
            return f"a step has been running for more than {self._stalled_s:g} s"
        return None

    def watch(self) -> None:
        """Logs when the answer has changed. Called about once a second."""
        problem = self.problem()
        if problem == self._said:
            return
        self._said = problem
        if problem is None:
            log.info("ready again")
        else:
            log.warning("not ready: %s", problem)
