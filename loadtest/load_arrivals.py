"""When requests of an open loop come: seconds after the test's begin, in order. Used by `load_session.py`.

An open loop asks whether or not anything has been answered, as users who do not know of each other do. The
closed loop, where each user asks again when it has its answer, needs no times and is not here.
"""

import itertools
import random
from collections.abc import Iterable, Iterator

from load_workloads import Job

KINDS = ("closed", "poisson", "bursts", "trace")


def poisson(rate_per_s: float, seed: int) -> Iterator[float]:
    """A Poisson process: independent users, without end."""
    rng = random.Random(f"{seed}:poisson")
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate_per_s)
        yield now_s


def bursts(rate_per_s: float, size: int, seed: int) -> Iterator[float]:
    """`size` requests at one moment; the moments are a Poisson process, and the mean rate is `rate_per_s`."""
    for moment_s in poisson(rate_per_s / size, seed):
        yield from itertools.repeat(moment_s, size)


def trace(jobs: Iterable[Job]) -> Iterator[float]:
    """As a file says, once. Raises ValueError for a request without `at_s` or before the one above it."""
    last_s = 0.0
    for number, job in enumerate(jobs, 1):
        if job.at_s is None:
            raise ValueError(f"request {number} of the file has no 'at_s', which --arrivals trace needs")
        if job.at_s < last_s:
            raise ValueError(f"request {number} of the file has 'at_s' {job.at_s}, before the one above it")
        last_s = job.at_s
        yield last_s
