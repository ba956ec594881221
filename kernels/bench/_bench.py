"""What the benchmarks share: kernels forced by name, a check before any time, and times taken in turns.

Ratios are what counts: both sides run in one process, in turns, so that a change of the machine's speed hits
both. A time is the median over the turns; on a GPU it is the device's own. Weights and caches are more than
the last-level cache holds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo_kernels import gpu
from octavo_kernels.cpu import library

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
CACHE_BYTES = 64 * 2**20  # more than is cached


def arguments(description: str, **choices: list[str]) -> argparse.Namespace:
    """Parsed; each of `choices` is one more option, whose first value is the default."""
    parser = argparse.ArgumentParser(description=description)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)  # of what is compared with; the kernels follow
    return args


def reference(run: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """`run` with the reference instead of the native kernels and the GPU's."""

    def forced(index: int) -> Tensor:
        chosen, library.library = library.library, lambda: None  # type: ignore[assignment]
        serves, gpu.serves = gpu.serves, lambda x: False
        try:
            return run(index)
        finally:
            library.library, gpu.serves = chosen, serves

    return forced


def compare(
    name: str,
    native: Callable[[int], Tensor],
    other: Callable[[int], Tensor],
    copies: int,
    turns: int,
    amount: float,
    unit: str,
    tolerance: float | None = None,
) -> None:
    """Prints one line, unless the two disagree: then it exits. `native` and `other` take the index of a copy
    of the data, in [0, copies). `amount`: of `unit`s that one call handles, such as GB. `tolerance`: of the
    relative error, by default what rounding to the type makes."""
    actual, expected = native(0), other(0)
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error <= (TOLERANCE[actual.dtype] if tolerance is None else tolerance):
        sys.exit(f"{name}: wrong, relative error {error:.1e}; no time is given")
    times: dict[Callable[[int], Tensor], list[float]] = {native: [], other: []}
    for _ in range(turns):
        for run, taken in times.items():
            taken.append(_seconds(run, copies, actual.is_cuda) / copies)
    ours_s, theirs_s = (statistics.median(taken) for taken in times.values())
    print(
        f"{name:40} {ours_s * 1e6:9.1f} us  {amount / ours_s:7.1f} {unit}/s  "
        f"{theirs_s / ours_s:5.2f} x the other's {theirs_s * 1e6:.1f} us"
    )


def _seconds(run: Callable[[int], Tensor], copies: int, on_gpu: bool) -> float:
    """How long the calls for all copies take together."""
    if not on_gpu:
        start_s = time.perf_counter()
        for index in range(copies):
            run(index)
        return time.perf_counter() - start_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for index in range(copies):
        run(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
