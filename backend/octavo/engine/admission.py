"""The waiting line: who is next, and whether it may start now. Owned by the scheduler, torch-free.

The order is `Sequence.rank`. The head of the line is never overtaken, so nobody starves within a priority.
"""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from octavo.engine.block_manager import Allocation, BlockManager
from octavo.engine.sequence import Sequence

_rank = attrgetter("rank")


class Admission:
    """`watermark` is the share of blocks that an admission leaves free for running sequences to grow into;
    without it a newcomer would take the last block and be preempted a step later."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, watermark: float = 0.01) -> None:
        self._blocks = block_manager
        self._max_num_seqs = max_num_seqs
        self._reserve = max(1, int(watermark * block_manager.num_blocks))
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=_rank)

    def remove(self, dropped: Callable[[Sequence], bool]) -> None:
        self._waiting = [seq for seq in self._waiting if not dropped(seq)]

    def take(self, running: list[Sequence], most_tokens: int | None = None) -> Sequence | None:
        """The head of the line if it has a seat and blocks, removed from the line; else None.

        A sequence takes seats for the children that will fork off it, so that a fork always succeeds.
        One with more than `most_tokens` stays in line (for when it cannot be computed in chunks).
        """
        if not self._waiting:
            return None
        head = self._waiting[0]
        if most_tokens is not None and head.num_tokens > most_tokens:
            return None
        seats = sum(1 + len(seq.children) for seq in running) + 1 + len(head.children)
        if seats > self._max_num_seqs:
            return None
        # With nobody running there is nobody to keep a reserve for.
        if self._blocks.can_allocate(head, self._reserve if running else 0) is not Allocation.NOW:
            return None
        return self._waiting.pop(0)
