"""Python's garbage collector in a process that serves. Owned by `tritonserver`; `loadtest/step_loop.py`
measures under it.

Left as it is, the collector goes through the live objects of a step several times in each step, and now and
then through everything that was loaded: about 0.1 s in which no token is made (seen at 1,000 sequences). What
was loaded lives as long as the process, and what a step makes dies by its reference counts, so neither is
worth looking at.
"""

import gc
from typing import Self

# More objects than the steps of 1,000 sequences keep alive, so that only cycles that pile up reach it.
_THRESHOLD = 50_000


class QuietCollector:
    """Call `start` once everything is loaded, and `close` when the model goes."""

    def __init__(self) -> None:
        self._threshold_before = gc.get_threshold()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Leaves out what there is from now on, and looks rarely at what comes."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_THRESHOLD, *self._threshold_before[1:])

    def close(self) -> None:
        """As it was before."""
        gc.set_threshold(*self._threshold_before)
        gc.unfreeze()
