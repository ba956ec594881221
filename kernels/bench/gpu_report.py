"""What `gpu.py` prints: a row for each figure, and how times are taken."""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
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


def ended_early(what: str) -> Row:
    return Row(f"{what}: ended early", math.inf, "", goal=0.0, is_check=True)


def guarded(what: str, rows: Iterable[Row]) -> Iterator[Row]:
    """`rows`, with one more in the place of those that an error keeps from coming."""
    try:
        yield from rows
    except Exception:
        traceback.print_exc()
        yield ended_early(what)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of one call, of turns of many calls in a row; on a GPU the device's own time, of which
    the wait for the first call's launch is a part."""
    calls, turns = (2, 3) if device.type == "cpu" else (50, 5)
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
