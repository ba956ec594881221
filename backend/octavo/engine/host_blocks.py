"""The host's part of the prefix cache: blocks that were evicted from the device, in slots of host memory.

Owned by `BlockManager`, engine thread, torch-free. It decides which slot holds what and says so in the plan's
swaps; the worker's `HostPool` has the memory and copies.

A block's content goes to a slot when the device evicts it (unless it is there already, or copying does not
pay) and stays there when it is copied back, so that evicting it once more costs no copy. Slots are given up
by when their content was used last: written, read, or left by the device.

The copies of a plan are made when its step runs. Until `confirm` says that it has, they are pending: a slot
that is read is not given to anyone else, and what was to be written is forgotten by the next `open` if no
`confirm` came, as after a step that failed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.engine.swap_choice import SwapChoice
from octavo.protocol import Swap


class HostBlocks:
    """`num_blocks` slots, each for one block; 0: no such tier. All operations are O(blocks touched)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.choice: SwapChoice | None = None  # None: always swap
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, who was used last at the end
        self._free = list(range(num_blocks))
        self._written: dict[int, tuple[bytes, int]] = {}  # by slot: what comes into it, and from which block
        self._read: list[Swap] = []
        self._held: set[int] = set()  # slots that are read
        self.num_swapped_out = 0  # blocks, since the start
        self.num_swapped_in = 0

    @property
    def num_used_blocks(self) -> int:
        return len(self._slots)

    def open(self) -> None:
        """A new plan begins. Call before anything else is asked in it."""
        for digest, _ in self._written.values():
            self._free.append(self._slots.pop(digest))
        self._close()
        if self.choice is not None:
            self.choice.open()

    def save(self, digest: bytes, block_id: int) -> None:
        """The device is about to overwrite a block whose content has this digest."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
        elif self.num_blocks and (self.choice is None or self.choice.out_pays()):
            slot = self._take()
            if slot is not None:
                self._slots[digest] = slot
                self._written[slot] = digest, block_id

    def has(self, digest: bytes) -> bool:
        """Any thread."""
        return digest in self._slots

    def count(self, digests: Iterable[bytes]) -> int:
        """How many of these, from the first on, `hold` would find now."""
        return len(self._find(digests))

    def hold(self, digests: Iterable[bytes]) -> list[int]:
        """The slots of these, from the first on until one is missing: `load` is called for them next, and
        nothing is written to them in this plan."""
        found = self._find(digests)
        for digest in reversed(found):  # a prefix is used whenever what follows it is
            self._slots.move_to_end(digest)
        slots = [self._slots[digest] for digest in found]
        self._held.update(slots)
        return slots

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """What the held slots have goes into these blocks of the device."""
        self._read += map(Swap, block_ids, slots)

    def swaps(self) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Of this plan: out of the device, and into it."""
        written = tuple(Swap(block_id, slot) for slot, (_, block_id) in self._written.items())
        return written, tuple(self._read)

    def confirm(self) -> None:
        """The plan's step has run: its copies are made."""
        self.num_swapped_out += len(self._written)
        self.num_swapped_in += len(self._read)
        self._close()

    def discard(self, digests: Iterable[bytes]) -> None:
        """Forgets what these slots hold."""
        assert not self._written, "between plans nothing is pending"
        for digest in digests:
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Raises `AssertionError` when an invariant does not hold."""
        taken = sorted([*self._slots.values(), *self._free])
        assert taken == list(range(self.num_blocks)), "a host slot is lost, or taken twice"
        for slot, (digest, _) in self._written.items():
            assert self._slots[digest] == slot, f"host slot {slot}: written for nobody"
        assert self._held == {swap.slot for swap in self._read}, "a host slot is held and not read"

    def _close(self) -> None:
        self._written, self._read = {}, []
        self._held.clear()

    def _find(self, digests: Iterable[bytes]) -> list[bytes]:
        if not self._slots or not (self.choice is None or self.choice.in_pays()):
            return []
        found = []
        for digest in digests:
            if digest not in self._slots:
                break
            found.append(digest)
        return found

    def _take(self) -> int | None:
        """A slot to write to, or None when all are read in this plan. What a slot was to get in this plan
        may still give way: it was evicted earlier, so it is farther from the beginning of its prompt."""
        if self._free:
            return self._free.pop()
        digest, slot = next(iter(self._slots.items()))
        if slot in self._held:  # the one used longest ago, so all others are as well, or are of this plan
            return None
        del self._slots[digest]
        return slot
