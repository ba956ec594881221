"""What the executor does in a step beside the forward, for real, and how long each part of a step takes.

Used by `step_loop.py` and `simulate.py`, whose steps have no model: the worker's rows, the tensors of the
forward and the results are made as on any other day, only the sampled tokens are made up.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from octavo.protocol import StepPlan, StepResult
from octavo.worker.executor import results_of
from octavo.worker.model_input import build_step
from octavo.worker.rows import Rows
from octavo.worker.sampler import Samples
from octavo_kernels import ops

PARTS = ("schedule", "input", "result", "update")  # of a step; their sum is its host time


class HostWork:
    """`spent_s` are the seconds of this thread's CPU time that each part of the step so far took."""

    def __init__(self, vocab_size: int, num_kv_heads: int, block_size: int) -> None:
        self.rows = Rows()
        self.spent_s: dict[str, float] = {}
        self._vocab_size = vocab_size
        self._layouts = (ops.KVLayout(num_kv_heads, block_size, None, torch.device("cpu")),)
        self._tokens = np.random.default_rng(0)

    def begin(self) -> None:
        """A step begins: nothing is spent yet."""
        self.spent_s = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start_s = time.thread_time()
        yield
        self.spent_s[part] = time.thread_time() - start_s

    def execute(self, plan: StepPlan) -> StepResult:
        """The plan's result, with random tokens, as the parts `input` and `result`."""
        with self.timed("input"):
            self.rows.apply(plan)
            step = build_step(self.rows, plan, self._layouts)
        count = len(step.seq_ids)
        samples = Samples(self._tokens.integers(0, self._vocab_size, count), np.ones(count, np.bool_), {})
        with self.timed("result"):
            self.rows.append(step.row_to_sequence, samples.token_ids)
            return StepResult(plan.step_id, results_of(step, samples))
