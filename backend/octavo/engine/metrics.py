"""The engine in numbers, for whoever exports metrics or watches its health.

`EngineStats` is a snapshot that any thread may take. `StepLog` is written by the engine's thread alone; one
other thread may take what it holds.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

_MOST_STEPS = 4096  # kept until somebody takes them; of more, the oldest are dropped


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they are, and totals since the start. Prefix queries and hits are counted in tokens."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # that a prompt can reuse, held or not
    num_reusable_blocks: int  # of those, the ones that no sequence holds
    num_shared_blocks: int  # that several sequences hold
    block_size: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    block_copies_total: int
    steps_total: int
    step_s_total: float
    forward_s_total: float
    sample_s_total: float
    requests_finished: dict[str, int]  # by how they ended: stop, length, abort, error
    num_host_blocks: int = 0  # slots of host memory for blocks that were evicted
    num_used_host_blocks: int = 0
    host_hits_total: int = 0  # tokens, of the prefix hits those that were copied from there
    swapped_out_bytes_total: int = 0
    swapped_in_bytes_total: int = 0
    disk_hits_total: int = 0  # tokens, of the prefix hits those that came from the prefix cache's directory
    disk_loaded_bytes_total: int = 0
    disk_saved_bytes_total: int = 0
    disk_dropped_blocks_total: int = 0  # not saved, since the disk was behind or refused
    disk_damaged_files_total: int = 0


class Step(NamedTuple):
    """One step that is done, or that failed."""

    duration_s: float
    num_tokens: int
    num_sequences: int


class StepLog:
    """`begin` and `end` around every step of the engine."""

    def __init__(self) -> None:
        self._done: deque[Step] = deque(maxlen=_MOST_STEPS)
        self._current: tuple[float, int, int] | None = None  # since when, tokens, sequences
        self.num_steps = 0
        self.duration_s = 0.0  # of all of them
        self.forward_s = 0.0  # of that, until their hidden states were there
        self.sample_s = 0.0  # and from there until their tokens were

    def begin(self, num_tokens: int, num_sequences: int) -> None:
        self._current = time.monotonic(), num_tokens, num_sequences

    def end(self) -> None:
        assert self._current is not None, "no step has begun"
        since_s, num_tokens, num_sequences = self._current
        self._current = None
        step = Step(time.monotonic() - since_s, num_tokens, num_sequences)
        self._done.append(step)
        self.num_steps += 1
        self.duration_s += step.duration_s

    def note_parts(self, forward_s: float, sample_s: float) -> None:
        """Where the time of the step that has just ended went, by the worker's own account."""
        self.forward_s += forward_s
        self.sample_s += sample_s

    def running_s(self) -> float:
        """How long the step that is under way has taken; 0 between two. Any thread."""
        current = self._current
        return 0.0 if current is None else time.monotonic() - current[0]

    def take(self) -> list[Step]:
        """Those that ended since the last call, in order."""
        steps = []
        while self._done:
            steps.append(self._done.popleft())
        return steps
