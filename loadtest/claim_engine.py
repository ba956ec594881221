"""Real engines for claims, stepped by hand: when each client's tokens came, and how many were computed.

The model is SmolLM2 135M in bfloat16 on this machine; a test puts a tiny one in its place.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from octavo import Engine, SamplingParams
from octavo.request import TextDelta
from offline import SMOLLM2

Make = Callable[..., Engine]  # of engine arguments


def smollm2(**arguments: object) -> Engine:
    return Engine({"model": SMOLLM2, "dtype": "bfloat16", "seed": 0, **arguments})


@dataclass
class Client:
    """What one request sees, in seconds of `time.perf_counter`."""

    added_s: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # when each came

    def take(self, delta: TextDelta) -> None:
        if delta.error:
            raise delta.error
        self.token_ids.extend(delta.token_ids)
        self.token_s.extend([time.perf_counter()] * len(delta.token_ids))

    @property
    def first_s(self) -> float:
        return self.token_s[0] - self.added_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next."""
        return np.diff(self.token_s).tolist()


class Run:
    """An engine, whose every request is greedy and runs to its full length."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = 0

    def add(self, prompt: Sequence[int], num_tokens: int) -> Client:
        self._num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        client = Client()
        request = self.engine.make_request(str(self._num_requests), prompt, params)
        self.engine.read_stored(request)
        self.engine.add(request, client.take)
        return client

    def drain(self) -> int:
        """To the end of all requests. Returns how many tokens were computed for them."""
        self.engine.steps.take()
        num_tokens = 0
        while self.engine.has_work:
            self.engine.step()
            num_tokens += sum(step.num_tokens for step in self.engine.steps.take())
        return num_tokens


@contextmanager
def running(engines: Iterable[Engine]) -> Iterator[list[Run]]:
    """Checks in the end that each engine is sound, and closes it."""
    runs = [Run(engine) for engine in engines]
    yield runs
    for run in runs:
        run.engine.check_integrity()
        run.engine.close()


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """A text that begins like no other; every model here has so many tokens."""
    return rng.integers(3, 256, count).tolist()
