"""Whether it is cheaper to copy a block from host memory than to compute it anew: `preemption_mode`.

Owned by the scheduler, which tells it how long steps and copies take; asked by `HostBlocks`. Engine thread,
torch-free.
"""

from collections import deque
from statistics import median_low

from octavo.config import PreemptionMode
from octavo.engine.step_times import StepTimes

_HALF_LIFE_STEPS = (
    1000  # of a size of steps: what a prompt takes is to be known after a long time without one
)
_RECENT = 5  # steps that copied
_RETRY_STEPS = 500  # after so many steps without a copy, one step's worth is tried anew


class SwapChoice:
    """`swap` always copies, `recompute` never does. `auto` copies out what comes back in less time than
    computing it takes, both ways counted, and copies in what does so one way.

    What a block takes to compute is the slope of the line through the steps' times, times its tokens: the
    base of a step is paid anyway. What it takes to copy is the median of recent steps that copied, either
    way, the lower one of two: a copy that was interrupted says nothing of the link. As long as nothing is
    known of one of the two, copying is tried.
    """

    def __init__(self, mode: PreemptionMode, block_size: int, times: StepTimes) -> None:
        self._mode = mode
        self._block_size = block_size
        self._times = times
        self._copy_s: deque[float] = deque(maxlen=_RECENT)  # of a block, in each of these steps
        self._last_copy = 0  # the step
        self._costs: tuple[float, float] | None = None  # of a block: to copy once, to compute; of this step

    @property
    def is_auto(self) -> bool:
        """Whether it wants to be told how long steps and copies take."""
        return self._mode == "auto"

    def note(self, num_blocks: int, duration_s: float) -> None:
        """So many blocks were copied, one way or the other, in so long."""
        self._copy_s.append(duration_s / num_blocks)
        self._last_copy = self._times.num_steps

    def open(self) -> None:
        """A step begins: what the last one has taught counts from now on."""
        self._costs = None

    def out_pays(self) -> bool:
        """Whether to copy blocks to the host in this step."""
        return self._pays(2)

    def in_pays(self) -> bool:
        """Whether to copy blocks from the host in this step."""
        return self._pays(1)

    def _pays(self, num_copies: int) -> bool:
        if self._mode != "auto":
            return self._mode == "swap"
        if self._costs is None:
            self._costs = self._estimate()
        copy_s, compute_s = self._costs
        return num_copies * copy_s < compute_s

    def _estimate(self) -> tuple[float, float]:
        line = self._times.line(_HALF_LIFE_STEPS)
        overdue = self._times.num_steps - self._last_copy >= _RETRY_STEPS
        if line is None or not self._copy_s or overdue:
            return 0.0, 1.0
        return median_low(self._copy_s), self._block_size * line[1]
