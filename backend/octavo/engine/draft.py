"""A step plan while it is being made. The scheduler makes one in `schedule`, engine thread. Torch-free."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from octavo.engine.block_manager import Appended, BlockManager
from octavo.engine.sequence import Sequence
from octavo.protocol import BlockCopy, Choice, Fork, NewSequence, Slice, StepPlan

# A named tuple's own constructor takes twice as long, and every sequence gets one in every step.
_slice_of = partial(tuple.__new__, Slice)


@dataclass(slots=True)
class Draft:
    """`charge` is told of every sequence how many of its tokens are computed. `born` are children that forked
    off here; they run from the next step on."""

    budget: int  # tokens that are not given out yet
    blocks: BlockManager
    charge: Callable[[Sequence, int], None] | None = None
    slices: list[Slice] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    born: list[Sequence] = field(default_factory=list)

    def compute(self, seq: Sequence, length: int, appended: Appended) -> None:
        """Puts the sequence's next `length` tokens into the plan, and its forks once the prompt is done.

        `appended` are the blocks that the worker has not seen: of a new sequence all that it has.
        """
        if self.charge:
            self.charge(seq, length)
        if appended.copy:
            self.copies.append(appended.copy)
        seq_id, start = seq.id, seq.num_computed_tokens
        samples: tuple[int, ...] = ()
        if start + length == len(seq.token_ids) and seq.is_sampled:
            samples = (seq_id, *self._fork(seq)) if seq.children else (seq_id,)
        self.slices.append(
            _slice_of((seq_id, start, length, appended.first_block, appended.block_ids, samples))
        )

    def plan(self, step_id: int, finished: Iterable[int]) -> StepPlan:
        swaps_out, swaps_in = self.blocks.host.swaps()
        return StepPlan(
            step_id=step_id,
            slices=tuple(self.slices),
            new=tuple(self.new),
            forks=tuple(self.forks),
            copies=tuple(self.copies),
            finished=tuple(finished),
            choices=tuple(self.choices),
            swaps_out=swaps_out,
            swaps_in=swaps_in,
            saves=self.blocks.disk.saves(),
            loads=self.blocks.disk.loads(),
            discards=self.blocks.disk.take_discards(),
        )

    def _fork(self, seq: Sequence) -> tuple[int, ...]:
        """The sequence's prompt is computed: its children run beside it from now on. Returns their ids."""
        children, seq.children = seq.children, ()
        for child in children:
            self.blocks.fork(seq, child)
            self.forks.append(Fork(seq.id, child.id, child.sampling))
        self.born.extend(children)
        return tuple(child.id for child in children)
