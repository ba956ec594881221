"""The waiting line: who is next, and whether it may start now. Owned by the scheduler, torch-free.

The order is that of the `WaitingLine`. Its head is overtaken only where a running sequence is about to
compute what the two have in common: requests with one prefix that come together would each compute it, and
one is enough. That lasts a step, since whoever runs gets all that it has to compute before others may start.
"""

from collections.abc import Callable, Iterable

from octavo.engine.block_manager import Allocation, BlockManager
from octavo.engine.sequence import Sequence
from octavo.engine.waiting_line import WaitingLine

# The share of blocks that an admission leaves free for running sequences to grow into. `choose_defaults.py`
# compares others.
WATERMARK = 0.01


def seats(sequences: Iterable[Sequence]) -> int:
    """How many of `max_num_seqs` they take: a sequence also those of the children that will fork off it, so
    that a fork always succeeds."""
    return sum(1 + len(seq.children) for seq in sequences)


class Admission:
    """Without a `watermark` a newcomer would take the last block and be preempted a step later."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        line: WaitingLine,
        watermark: float = WATERMARK,
    ) -> None:
        self._blocks = block_manager
        self._max_num_seqs = max_num_seqs
        self._reserve = max(1, int(watermark * block_manager.num_blocks))
        self._line = line
        self._held: list[Sequence] = []  # out of line until the next step

    def __len__(self) -> int:
        return len(self._line) + len(self._held)

    def add(self, seq: Sequence) -> None:
        self._line.add(seq)

    def remove(self, dropped: Callable[[Sequence], bool]) -> None:
        self._line.remove(dropped)
        self._held = [seq for seq in self._held if not dropped(seq)]

    def open(self) -> None:
        """Call before the first `take` of a step: who was held back in the last one is in line again."""
        held, self._held = self._held, []
        for seq in held:
            self._line.put_back(seq)

    def take(
        self, seats_taken: int, most_tokens: int | None = None, most_sequences: int | None = None
    ) -> Sequence | None:
        """The head of the line if its team has seats and blocks, removed from the line; else None.

        `seats_taken` are those of all that run. One with more than `most_tokens` stays in line (for when it
        cannot be computed in chunks; beams that resume together can always be, since together they may have
        more tokens than any step). So does a team of more than `most_sequences`, and everyone once this step
        copies enough from files.
        """
        head = self._head()
        if head is None or not self._blocks.disk.takes_more:
            return None
        team = head.team
        if most_tokens is not None and head.num_tokens > most_tokens and len(team) == 1:
            return None
        if most_sequences is not None and len(team) > most_sequences:
            return None
        if seats_taken + seats(team) > self._max_num_seqs:
            return None
        # With nobody running there is nobody to keep a reserve for.
        reserve = self._reserve if seats_taken else 0
        reserve += sum(map(self._blocks.num_missing_blocks, team[1:]))
        if self._blocks.can_allocate(head, reserve) is not Allocation.NOW:
            return None
        return self._line.take()

    def _head(self) -> Sequence | None:
        """The first in line that is not held back."""
        while (head := self._line.head()) is not None and self._blocks.awaits(head):
            if len(self._held) == self._max_num_seqs:
                return None  # more than that many could not start together anyway
            self._held.append(self._line.take())
        return head
