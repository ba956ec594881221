"""What `gpu.py` prints: a row for each figure, and how times are taken."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A figure with its unit; and, where there is one, its fraction of what the card can do, and the goal for
    that. A check's figure is a relative error, and its goal the most that it may be."""

    what: str
    figure: float
    unit: str
    fraction: float | None = None
    goal: float | None = None
    is_check: bool = False

    @property
    def ok(self) -> bool:
        if self.goal is None:
            return True
        if self.is_check:
            return self.figure <= self.goal
        return self.fraction is not None and self.fraction >= self.goal

    def __str__(self) -> str:
        figure = f"{self.figure:.1e}" if self.is_check else f"{self.figure:,.3f}"
        fraction = "" if self.fraction is None else f"{self.fraction:.2f}"
        goal = "" if self.goal is None else f"{'at most' if self.is_check else 'goal'} {self.goal:g}"
        verdict = "" if self.ok else "MISSED"
        return f"{self.what:58} {figure:>12} {self.unit:18} {fraction:>5} {goal:14} {verdict}".rstrip()


def seconds(run: Callable[[], object], device: torch.device, calls: int = 10, turns: int = 5) -> float:
    """The median time of one call, of turns of so many calls in a row; on a GPU the device's own time."""
    run()
    taken = [_turn(run, device, calls) / calls for _ in range(turns)]
    return statistics.median(taken)


def _turn(run: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cpu":
        begin_s = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
