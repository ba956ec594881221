"""The directory's part of the prefix cache as plans know it: which blocks go to files, and which come from
them.

Owned by `BlockManager`, engine thread, torch-free. Files are read elsewhere, before the scheduler has the
request (`prefix_reader.py`): what was read hangs on the request until it is admitted. Whether a file is
written is the worker's affair: a block that is lost is computed.

A block is saved when somebody uses it who has not computed it, and when the device gives it up. One that was
saved long ago is saved anew when it is used: that tells the directory, which deletes what was used least
recently, and brings back what it has deleted.
"""

import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence

from octavo.protocol import BlockFile

_AGAIN_S = 600.0
_MOST_SAVES = 32  # in one plan: the step waits until their content is copied
_MOST_DISTRUSTED = 65536
_ENOUGH_LOADS = 256  # the same: with so many, nobody else is admitted in it


class DiskBlocks:
    """Without a directory, `is_there` is false and nothing happens here."""

    def __init__(self, is_there: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_there = is_there
        self._clock = clock
        self._saved_s: dict[int, float] = {}  # by block of the device: when its content was saved
        self._used: list[BlockFile] = []  # to be saved by this plan, heads first
        self._evicted: list[BlockFile] = []  # the same, tails first
        self._loads: list[BlockFile] = []
        self._in_flight: list[object] = []  # what they get, kept until the plan's step has run
        self._discards: list[str] = []
        self._distrusted: dict[bytes, None] = {}  # the oldest first
        self.num_loaded = 0  # blocks, since the start

    def open(self) -> None:
        """A new plan begins. Call before anything else is asked in it."""
        self._used, self._evicted, self._loads, self._in_flight = [], [], [], []

    def use(self, digests: Iterable[bytes], block_ids: Iterable[int]) -> None:
        """A prompt takes these blocks, its first ones, as they are."""
        if not self.is_there:
            return
        now_s = self._clock()
        for digest, block_id in zip(digests, block_ids, strict=False):
            saved_s = self._saved_s.get(block_id)
            if (saved_s is None or now_s - saved_s >= _AGAIN_S) and self._has_room:
                self._saved_s[block_id] = now_s
                self._used.append(BlockFile(block_id, digest.hex()))

    def reuse(self, block_id: int, digest: bytes | None) -> None:
        """The device is about to overwrite a block, whose content has this digest if it is worth anything."""
        saved_s = self._saved_s.pop(block_id, None)
        if digest is not None and saved_s is None and self.is_there and self._has_room:
            self._evicted.append(BlockFile(block_id, digest.hex()))

    def load(
        self, digests: Sequence[bytes], block_ids: Sequence[int], stored: MutableMapping[bytes, object]
    ) -> int:
        """Those of these blocks, from the first on until one is missing in `stored`, get what it has. Returns
        how many do. `stored` is empty then."""
        count = self.count(digests, stored)
        now_s = self._clock()
        for digest, block_id in zip(digests[:count], block_ids, strict=False):
            self._saved_s[block_id] = now_s
            self._loads.append(BlockFile(block_id, digest.hex()))
            self._in_flight.append(stored[digest])
        stored.clear()
        return count

    def count(self, digests: Iterable[bytes], stored: MutableMapping[bytes, object]) -> int:
        """How many of these `load` would find."""
        count = 0
        for digest in digests:
            if digest not in stored or digest in self._distrusted:
                break
            count += 1
        return count

    @property
    def takes_more(self) -> bool:
        """Whether somebody else may be admitted in this plan, who may bring more to load."""
        return len(self._loads) < _ENOUGH_LOADS

    def discard(self, digests: Iterable[bytes]) -> None:
        """Has their files deleted: what they hold may be wrong. Nor is it used that somebody has read them
        before they are."""
        if self.is_there:
            for digest in digests:
                self._discards.append(digest.hex())
                self._distrusted[digest] = None
            while len(self._distrusted) > _MOST_DISTRUSTED:
                del self._distrusted[next(iter(self._distrusted))]

    def saves(self) -> tuple[BlockFile, ...]:
        """Of this plan, what was used last first."""
        return (*self._used, *reversed(self._evicted))

    def loads(self) -> tuple[BlockFile, ...]:
        """Of this plan."""
        self.num_loaded += len(self._loads)
        return tuple(self._loads)

    def take_discards(self) -> tuple[str, ...]:
        """Digests of the files to delete, since the last call."""
        discards, self._discards = self._discards, []
        return tuple(discards)

    @property
    def _has_room(self) -> bool:
        return len(self._used) + len(self._evicted) < _MOST_SAVES
