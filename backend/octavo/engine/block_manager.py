"""Who owns which KV block: reference counts, the free list, the prefix cache and copy-on-write.

The design is PagedAttention's (Kwon et al., SOSP 2023) with a chained-hash prefix cache. The scheduler is
the only caller. Only this file touches reference counts; it fills `Sequence.block_table` for the scheduler.

Invariants, checked by `check_integrity`:
- a block is in the free list exactly once when its reference count is 0, and not at all otherwise;
- a reference count is the number of block tables that hold the block;
- the numbers of shared and of reusable blocks are what a count over all blocks would give;
- a block with a hash is full, never written again, and is the one that the prefix cache names for it;
- slots from a sequence's `num_computed_tokens` up to its `num_writable_tokens` are in blocks of its own;
- a hash is coming when a sequence has a block for it that it has yet to fill, or that is yet to be copied in.

Evicted blocks may live on in host memory (`host_blocks.py`): `allocate` takes them from there where the
device's part of the cache ends. A block that is copied in is published like one that is computed, when its
step has run.

The free list is ordered by who is evicted first: blocks that hold nothing reusable, then cached blocks by
last use, the tail of a sequence before its head, so that a shared prefix outlives what followed it.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from octavo.engine.disk_blocks import DiskBlocks
from octavo.engine.host_blocks import HostBlocks
from octavo.engine.sequence import Sequence
from octavo.protocol import BlockCopy, BlockFile
from octavo.request import Request

# Versions the hash: instances and stored caches that disagree on it must not share blocks.
_HASH_KEY = b"octavo-kv-1"


class Allocation(Enum):
    NOW = "now"
    LATER = "later"  # when others have freed blocks
    NEVER = "never"  # not even with all blocks free


@dataclass(frozen=True, slots=True)
class Appended:
    """What `append` did: `block_ids` now stand in the block table from index `first_block` on."""

    first_block: int
    block_ids: tuple[int, ...]
    copy: BlockCopy | None = None


_NOTHING = Appended(0, ())


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens, and host memory for `num_host_blocks` evicted ones, where
    without prefix caching nothing ever goes. All operations are O(blocks touched)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        has_directory: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostBlocks(num_host_blocks)
        self.disk = DiskBlocks(has_directory)
        self._caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}
        self._coming: dict[bytes, Sequence] = {}  # who will publish it, unless it ends before
        self._num_shared = 0
        self._num_reusable = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content a later prompt can reuse, referenced or not."""
        return len(self._cached)

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one block table holds."""
        return self._num_shared

    @property
    def num_reusable_blocks(self) -> int:
        """Free blocks whose content a later prompt can reuse."""
        return self._num_reusable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> Allocation:
        """Whether all tokens of a waiting sequence fit, leaving `reserve` blocks free."""
        total = self.blocks_for(seq.num_tokens)
        if total > self.num_blocks:
            return Allocation.NEVER
        fits = self.num_missing_blocks(seq) + reserve <= len(self._free)
        return Allocation.NOW if fits else Allocation.LATER

    def num_missing_blocks(self, seq: Sequence) -> int:
        """How many blocks `allocate` would take off the free list, at most: others may bring in a prefix."""
        in_use = sum(self._ref_counts[block_id] > 0 for block_id in self._cached_prefix(self._reusable(seq)))
        return self.blocks_for(seq.num_tokens) - in_use

    def allocate(self, seq: Sequence) -> int:
        """Gives a waiting sequence blocks for all its tokens, cached ones first.

        Returns how many leading tokens the cache holds, the host's and the directory's part included; at
        least one token is always left to compute, since its logits are needed. Call only after `can_allocate`
        said NOW.
        """
        assert not seq.block_table
        digests = self._reusable(seq)
        hits = self._cached_prefix(digests)
        for block_id in hits:
            self._reference(block_id)
        self.disk.use(digests, hits)
        slots = self.host.hold(digests[len(hits) :])  # before any block is taken, which may evict to the host
        fresh = [self._take() for _ in range(self.blocks_for(seq.num_tokens) - len(hits))]
        self.host.load(slots, fresh)
        num_known = len(hits) + len(slots)
        num_known += self.disk.load(digests[num_known:], fresh[len(slots) :], seq.request.stored)
        seq.block_table.extend(hits + fresh)
        seq.num_committed_blocks = len(hits)
        seq.num_writable_tokens = len(seq.block_table) * self.block_size
        if self._caching:
            full = seq.num_tokens // self.block_size
            self._extend_hashes(seq, full)
            for digest in seq.block_hashes[len(hits) : full]:
                if digest not in self._cached:
                    self._coming.setdefault(digest, seq)
        return num_known * self.block_size

    def num_cached_tokens(self, seq: Sequence) -> int:
        """How many leading tokens of a waiting sequence `allocate` would find in the cache now."""
        digests = self._reusable(seq)
        num_known = len(self._cached_prefix(digests))
        num_known += self.host.count(digests[num_known:])
        num_known += self.disk.count(digests[num_known:], seq.request.stored)
        return num_known * self.block_size

    def missing(self, request: Request) -> list[bytes]:
        """The hashes of a prompt's blocks that it may take from a cache, from the first on that neither the
        device nor the host has. Any thread: the answer may be old when it is given, and only tells what to
        read ahead."""
        if not self._caching or request.needs_whole_prompt:
            return []
        hashes: list[bytes] = []
        tokens = array("i", request.prompt_token_ids)
        _extend(hashes, tokens, request.cache_salt, self.block_size, (len(tokens) - 1) // self.block_size)
        held = (digest in self._cached or self.host.has(digest) for digest in hashes)
        first = next((index for index, is_held in enumerate(held) if not is_held), len(hashes))
        return hashes[first:]

    def cached_blocks(self) -> list[BlockFile]:
        """All that a prompt can reuse on the device and nobody holds, what was used last first, heads before
        tails."""
        named = ((block_id, self._hashes[block_id]) for block_id in reversed(list(self._free)))
        return [BlockFile(block_id, digest.hex()) for block_id, digest in named if digest is not None]

    def awaits(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to fill the first block that the device lacks for this one."""
        if not self._coming:
            return False
        missing = (digest for digest in self._reusable(seq) if digest not in self._cached)
        return next(missing, None) in self._coming

    def append(self, seq: Sequence, num_tokens: int) -> Appended | None:
        """Makes the slots of a running sequence's next `num_tokens` tokens exist and belong to it alone.

        None, with nothing changed, when that takes more blocks than are free.
        """
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        if end <= seq.num_writable_tokens:
            return _NOTHING  # as in most steps of most sequences
        table, first = seq.block_table, start // self.block_size
        writes_shared = first < len(table) and self._ref_counts[table[first]] > 1
        missing = max(self.blocks_for(end) - len(table), 0)
        if missing + writes_shared > len(self._free):
            return None
        copy = None
        if writes_shared:
            assert first == len(table) - 1, "only the last block of a table can be partly filled"
            copy = BlockCopy(table[first], self._take())
            table[first] = copy.destination
            self._release(copy.source)
        else:
            first = len(table)
        table.extend(self._take() for _ in range(missing))
        seq.num_writable_tokens = len(table) * self.block_size
        return Appended(first, tuple(table[first:]), copy)

    def can_append(self, sequences: Iterable[Sequence]) -> bool:
        """Whether `append` would find room for the next token of all of these that have one to compute."""
        missing = 0
        writers: Counter[int] = Counter()  # by block
        for seq in sequences:
            start = seq.num_computed_tokens
            if seq.num_writable_tokens <= start < seq.num_tokens:
                index = start // self.block_size
                if index < len(seq.block_table):
                    writers[seq.block_table[index]] += 1
                else:
                    missing += 1
        # Whoever writes last to a block that was shared keeps it.
        copies = sum(min(count, self._ref_counts[block_id] - 1) for block_id, count in writers.items())
        return missing + copies <= len(self._free)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares every block of the parent; whoever writes first gets a copy."""
        assert not child.block_table
        for block_id in parent.block_table:
            self._reference(block_id)
        child.block_table.extend(parent.block_table)
        child.block_hashes = parent.block_hashes.copy()
        child.num_committed_blocks = parent.num_committed_blocks
        parent.num_writable_tokens = 0  # the next `append` of either looks who has the last block

    def commit(self, seq: Sequence) -> None:
        """Publishes blocks that have become full and computed, so that other prompts can reuse them."""
        if not self._caching:
            return
        full = seq.num_computed_tokens // self.block_size
        if full <= seq.num_committed_blocks:
            return
        self._extend_hashes(seq, full)
        for index in range(seq.num_committed_blocks, full):
            block_id, digest = seq.block_table[index], seq.block_hashes[index]
            # Two sequences that computed the same prefix side by side: the first one's block is kept.
            if self._hashes[block_id] is None and digest not in self._cached:
                self._hashes[block_id] = digest
                self._cached[digest] = block_id
        self._forget_coming(seq, seq.block_hashes[seq.num_committed_blocks : full])
        seq.num_committed_blocks = full

    def distrust(self, seq: Sequence) -> None:
        """Takes a sequence's blocks out of the prefix cache: what they hold may be wrong (a NaN)."""
        for block_id in seq.block_table:
            self._uncache(block_id)
        self.host.discard(seq.block_hashes)
        self.disk.discard(seq.block_hashes)

    def free(self, seq: Sequence) -> None:
        self._forget_coming(seq, seq.block_hashes[seq.num_committed_blocks :])
        for index in reversed(range(len(seq.block_table))):
            self._release(seq.block_table[index])
            if index < seq.num_committed_blocks:
                # Where it has computed what the cache holds already, that is what it has used.
                named = self._cached.get(seq.block_hashes[index])
                if named is not None and named in self._free:
                    self._free.move_to_end(named)
        seq.block_table.clear()
        seq.num_committed_blocks = seq.num_writable_tokens = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises `AssertionError` when an invariant does not hold for these live sequences."""
        counts = [0] * self.num_blocks
        num_coming = 0
        for seq in sequences:
            yet_to_fill = seq.block_hashes[seq.num_committed_blocks : len(seq.block_table)]
            num_coming += sum(self._coming.get(digest) is seq for digest in yet_to_fill)
            for block_id in seq.block_table:
                counts[block_id] += 1
            first = seq.num_computed_tokens // self.block_size
            for block_id in seq.block_table[first : seq.num_writable_tokens // self.block_size]:
                assert self._ref_counts[block_id] == 1, f"block {block_id}: shared, but seen as writable"
        for block_id, (count, digest) in enumerate(zip(self._ref_counts, self._hashes, strict=True)):
            assert count == counts[block_id], f"block {block_id}: {count} references"
            assert (block_id in self._free) == (count == 0), f"block {block_id}: free list"
            if digest is not None:
                assert self._cached.get(digest) == block_id, f"block {block_id}: prefix cache"
        assert len(self._cached) == sum(digest is not None for digest in self._hashes)
        assert self._num_shared == sum(count > 1 for count in counts), f"{self._num_shared} shared blocks"
        reusable = sum(self._hashes[block_id] is not None for block_id in self._free)
        assert self._num_reusable == reusable, f"{self._num_reusable} reusable blocks"
        assert len(self._coming) == num_coming, "nobody is about to fill a block that is said to be coming"
        self.host.check_integrity()

    def _reference(self, block_id: int) -> None:
        count = self._ref_counts[block_id]
        if count == 0:
            del self._free[block_id]
            self._num_reusable -= self._hashes[block_id] is not None
        elif count == 1:
            self._num_shared += 1
        self._ref_counts[block_id] = count + 1

    def _release(self, block_id: int) -> None:
        count = self._ref_counts[block_id] - 1
        assert count >= 0
        self._ref_counts[block_id] = count
        if count == 0:
            self._free[block_id] = None
            if self._hashes[block_id] is None:
                self._free.move_to_end(block_id, last=False)
            else:
                self._num_reusable += 1
        elif count == 1:
            self._num_shared -= 1

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        digest = self._uncache(block_id)
        if digest is not None:
            self._num_reusable -= 1
            self.host.save(digest, block_id)
        self.disk.reuse(block_id, digest)
        self._ref_counts[block_id] = 1
        return block_id

    def _uncache(self, block_id: int) -> bytes | None:
        """Returns what it was named."""
        digest = self._hashes[block_id]
        if digest is not None:
            del self._cached[digest]
            self._hashes[block_id] = None
        return digest

    def _forget_coming(self, seq: Sequence, hashes: Iterable[bytes]) -> None:
        for digest in hashes:
            if self._coming.get(digest) is seq:
                del self._coming[digest]

    def _reusable(self, seq: Sequence) -> list[bytes]:
        """The hashes of its leading blocks that it may take from a cache."""
        if not self._caching or seq.needs_whole_prompt:
            return []
        usable = (seq.num_tokens - 1) // self.block_size
        self._extend_hashes(seq, usable)
        return seq.block_hashes[:usable]

    def _cached_prefix(self, digests: Iterable[bytes]) -> list[int]:
        hits = []
        for digest in digests:
            block_id = self._cached.get(digest)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        _extend(seq.block_hashes, seq.token_ids, seq.request.cache_salt, self.block_size, num_blocks)


def _extend(
    hashes: list[bytes], token_ids: "array[int]", salt: str | None, block_size: int, num_blocks: int
) -> None:
    """Makes the hashes of a text's leading blocks `num_blocks`."""
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else _root_hash(salt or "")
        digest = blake2b(parent, digest_size=16, key=_HASH_KEY)
        digest.update(token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(digest.digest())


def _root_hash(salt: str) -> bytes:
    """What a first block hangs on. Its own `person` keeps a salt from passing for a block's digest."""
    salted = salt.encode("utf-8", "surrogatepass")
    return blake2b(salted, digest_size=16, key=_HASH_KEY, person=b"root").digest()
