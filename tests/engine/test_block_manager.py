"""The block manager against a model of it: who holds which block, and what the cache may give."""

from array import array
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.block_manager import Allocation, Appended, BlockManager
from octavo.engine.sequence import Sequence
from octavo.protocol import BlockCopy, RowSampling
from octavo.request import Request

GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0)


def sequence(tokens: Iterable[int], id: int = 1, salt: str | None = None) -> Sequence:
    token_ids = array("i", tokens)
    request = Request(f"r{id}", tuple(token_ids), cache_salt=salt)
    return Sequence(id, request, 0, id, GREEDY, frozenset(), 0, len(token_ids) + 100, token_ids)


def run(manager: BlockManager, seq: Sequence) -> int:
    """Allocates and computes all tokens of a sequence; returns the number that the cache held."""
    assert manager.can_allocate(seq) is Allocation.NOW
    cached = manager.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    manager.commit(seq)
    return cached


def test_allocate_gives_whole_blocks_and_free_returns_them() -> None:
    manager = BlockManager(10, 4)
    seq = sequence(list(range(9)))
    assert run(manager, seq) == 0
    assert len(seq.block_table) == 3
    assert (manager.num_free_blocks, manager.num_used_blocks) == (7, 3)
    manager.free(seq)
    assert seq.block_table == []
    assert manager.num_free_blocks == 10
    manager.check_integrity([])


def test_can_allocate_says_now_later_or_never() -> None:
    manager = BlockManager(4, 2)
    first = sequence([1] * 5)
    assert manager.can_allocate(sequence([0] * 9)) is Allocation.NEVER
    assert manager.can_allocate(first, reserve=1) is Allocation.NOW
    assert manager.can_allocate(first, reserve=2) is Allocation.LATER
    run(manager, first)
    assert manager.can_allocate(sequence([2] * 3, 2)) is Allocation.LATER


def test_a_prefix_is_reused_up_to_the_last_full_block_but_never_whole() -> None:
    manager = BlockManager(20, 4)
    first = sequence(list(range(8)))
    run(manager, first)
    manager.free(first)
    assert manager.num_cached_blocks == 2
    same = sequence(list(range(8)), 2)
    assert run(manager, same) == 4  # the last token must be computed for its logits
    longer = sequence([*range(8), 99], 3)
    assert run(manager, longer) == 8
    assert same.block_table[0] == longer.block_table[0]
    other = sequence([0, 1, 2, 7, 4, 5, 6, 7, 8], 4)
    assert run(manager, other) == 0
    manager.check_integrity([same, longer, other])


def test_salts_keep_prefixes_apart() -> None:
    manager = BlockManager(20, 2)
    run(manager, sequence([1, 2, 3, 4, 5], 1, salt="a"))
    assert run(manager, sequence([1, 2, 3, 4, 5], 2, salt="b")) == 0
    assert run(manager, sequence([1, 2, 3, 4, 5], 3)) == 0
    assert run(manager, sequence([1, 2, 3, 4, 5], 4, salt="a")) == 4


def test_without_prefix_caching_nothing_is_reused() -> None:
    manager = BlockManager(20, 2, enable_prefix_caching=False)
    run(manager, sequence([1, 2, 3, 4, 5]))
    assert run(manager, sequence([1, 2, 3, 4, 5], 2)) == 0
    assert manager.num_cached_blocks == 0


def test_the_tail_is_evicted_before_the_head_and_old_before_recent() -> None:
    manager = BlockManager(6, 2)
    old, recent = sequence([1, 2, 3, 4, 5], 1), sequence([6, 7, 8, 9, 10], 2)
    run(manager, old)
    run(manager, recent)
    manager.free(old)
    manager.free(recent)
    # Both have two cached blocks and a half-full one; three new blocks take the two halves and old's tail.
    run(manager, sequence([20, 21, 22, 23, 24], 3))
    assert manager.can_allocate(sequence([0] * 8)) is Allocation.LATER
    again = sequence([1, 2, 3], 4)
    assert manager.allocate(again) == 2
    manager.free(again)
    assert manager.allocate(sequence([6, 7, 8, 9, 10], 5)) == 2  # `again` took this one's tail


def test_the_first_writer_of_a_shared_block_gets_a_copy_and_the_last_one_does_not() -> None:
    manager = BlockManager(10, 4)
    parent, child = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 5, 6], 2)
    run(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = parent.num_computed_tokens
    shared = parent.block_table[1]
    assert manager.num_used_blocks == 2
    appended = manager.append(child, 1)
    assert appended is not None
    assert appended.copy is not None
    assert (appended.first_block, appended.block_ids) == (1, (child.block_table[1],))
    assert appended.copy.source == shared
    assert appended.copy.destination == child.block_table[1] != shared
    assert child.block_table[0] == parent.block_table[0]
    assert manager.append(parent, 1) == Appended(2, ())
    assert parent.block_table[1] == shared
    manager.check_integrity([parent, child])


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = BlockManager(10, 4)
    parent, child = sequence([1, 2, 3, 4]), sequence([1, 2, 3, 4], 2)
    run(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 4
    for seq in (parent, child):
        assert manager.append(seq, 1) == Appended(1, (seq.block_table[1],))
    assert parent.block_table[0] == child.block_table[0]
    assert parent.block_table[1] != child.block_table[1]


def test_append_counts_the_copy_and_changes_nothing_when_blocks_run_out() -> None:
    manager = BlockManager(2, 4)
    parent, child = sequence([1, 2, 3]), sequence([1, 2, 3], 2)
    run(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 3
    assert manager.append(child, 3) is None
    assert child.block_table == parent.block_table
    assert manager.append(child, 1) is not None
    assert manager.num_free_blocks == 0
    assert manager.append(parent, 1) == Appended(1, ())
    parent.num_computed_tokens = 4
    assert manager.append(parent, 1) is None
    manager.check_integrity([parent, child])


def test_shared_and_reusable_blocks_are_counted_as_they_change_hands() -> None:
    manager = BlockManager(5, 2)

    def counts() -> tuple[int, int]:
        return manager.num_shared_blocks, manager.num_reusable_blocks

    first, same, child = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6], 2), sequence([1, 2, 3, 4, 5], 3)
    run(manager, first)
    assert counts() == (0, 0)
    run(manager, same)  # its two full blocks are the first one's
    assert counts() == (2, 0)
    manager.fork(first, child)
    assert counts() == (3, 0)
    manager.free(first)
    assert counts() == (2, 0)
    manager.free(child)
    assert counts() == (0, 0)
    manager.free(same)
    assert counts() == (0, 2)
    other = sequence([7] * 7, 4)
    run(manager, other)  # three blocks are empty, the fourth held the tail of what is cached
    assert counts() == (0, 1)
    manager.free(other)
    assert counts() == (0, 4)
    run(manager, sequence([1, 2, 9], 5))  # the cached head, and the block that is not full
    assert counts() == (0, 3)


def test_check_integrity_sees_a_leak_and_a_double_reference() -> None:
    manager = BlockManager(4, 2)
    seq = sequence([1, 2, 3])
    run(manager, seq)
    with pytest.raises(AssertionError, match="block"):
        manager.check_integrity([])
    with pytest.raises(AssertionError, match="block"):
        manager.check_integrity([seq, seq])
    manager.check_integrity([seq])
    for counter, words in {"_num_shared": "shared blocks", "_num_reusable": "reusable blocks"}.items():
        setattr(manager, counter, 1)
        with pytest.raises(AssertionError, match=f"1 {words}"):
            manager.check_integrity([seq])
        setattr(manager, counter, 0)


def test_can_append_counts_new_blocks_and_all_copies_but_the_last_writers() -> None:
    manager = BlockManager(4, 4)
    family = [sequence(range(6), i) for i in range(3)]
    run(manager, family[0])  # two blocks, the second half full; two are free
    for child in family[1:]:
        manager.fork(family[0], child)
        child.num_computed_tokens = 6
    for seq in family:
        seq.token_ids.append(9)
    assert manager.can_append(family)
    other = sequence([5], 9)
    manager.allocate(other)
    assert not manager.can_append(family)  # one is free, and two of the three need copies
    assert manager.can_append(family[:1])
    family[2].num_computed_tokens = 7  # it has nothing to compute
    assert not manager.can_append(family)
    manager.free(other)
    for seq in family[:2]:
        assert manager.append(seq, 1) is not None
    assert manager.num_free_blocks == 0


class Machine(RuleBasedStateMachine):
    """Random programs of allocate, append, fork and free, with the content of every block tracked, on the
    device and on the host. Each operation is a step; those that take blocks may fail."""

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 3, 8]),
        caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 1, 4, 40]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, num_host_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching, num_host_blocks)
        self.size = block_size
        self.live: list[Sequence] = []
        self.content: dict[int, list[tuple[int, ...]]] = {}  # block -> the prefix stored in each of its slots
        self.host: dict[int, list[tuple[int, ...]]] = {}  # the same by host slot
        self.full: dict[bytes, list[tuple[int, ...]]] = {}  # what a block of that hash holds
        self.count = 0
        self.parents: dict[bytes, bytes] = {}  # of the hashes of blocks
        self.freed: dict[bytes, int] = {}  # when a sequence that had the content was freed last

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from([None, "s"]),
        fails=st.booleans(),
    )
    def allocate(self, tokens: list[int], salt: str | None, fails: bool) -> None:
        self.count += 1
        seq = sequence(tokens, self.count, salt)
        fits = self.manager.can_allocate(seq)
        if -(-len(tokens) // self.size) > self.manager.num_blocks:
            assert fits is Allocation.NEVER
        if fits is not Allocation.NOW:
            return
        self.manager.host.open()
        known = self.manager.num_cached_tokens(seq)
        seq.num_computed_tokens = self.manager.allocate(seq)
        assert seq.num_computed_tokens == known < len(tokens)
        self.live.append(seq)
        if not self.move(fails=fails):
            self.free_one(seq)
            return
        self.check_content(seq)
        self.write(seq, seq.num_uncomputed_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), fails=st.booleans())
    def append(self, data: st.DataObject, tokens: list[int], fails: bool) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.manager.host.open()
        free = self.manager.num_free_blocks
        table = seq.block_table.copy()
        appended = self.manager.append(seq, len(tokens))
        if appended is None:
            assert (seq.block_table, self.manager.num_free_blocks) == (table, free)
            return
        if not self.move(appended.copy, fails=fails):
            self.free_one(seq)
            return
        seq.token_ids.extend(tokens)
        assert len(seq.block_table) == -(-seq.num_tokens // self.size)
        assert free - self.manager.num_free_blocks == len(appended.block_ids)
        self.check_content(seq)
        self.write(seq, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        self.count += 1
        child = sequence(parent.token_ids, self.count, parent.request.cache_salt)
        used = self.manager.num_used_blocks
        self.manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        assert self.manager.num_used_blocks == used
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_one(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.manager.distrust(seq)
        assert not any(self.manager._hashes[block_id] for block_id in seq.block_table)
        assert not set(seq.block_hashes) & set(self.manager.host._slots)
        self.free_one(seq)

    def free_one(self, seq: Sequence) -> None:
        self.count += 1
        self.freed.update(dict.fromkeys(seq.block_hashes[: seq.num_committed_blocks], self.count))
        self.manager.free(seq)
        self.live.remove(seq)

    def move(self, copy: BlockCopy | None = None, *, fails: bool) -> bool:
        """The step's copies. One that fails leaves anything where it was to write. Returns whether it ran."""
        swaps_out, swaps_in = self.manager.host.swaps()
        assert len({swap.slot for swap in swaps_out}) == len(swaps_out)
        for block_id, slot in swaps_out:
            self.host[slot] = [] if fails else self.content[block_id].copy()
        if copy:
            self.content[copy.destination] = [] if fails else self.content[copy.source].copy()
        for block_id, slot in swaps_in:
            self.content[block_id] = [] if fails else self.host[slot].copy()
        if fails:
            self.manager.host.open()
        else:
            self.manager.host.confirm()
        return not fails

    def write(self, seq: Sequence, num_tokens: int) -> None:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            block = seq.block_table[position // self.size]
            slots = self.content.setdefault(block, [])
            del slots[position % self.size :]
            slots.append(self.prefix(seq, position))
        seq.num_computed_tokens += num_tokens
        self.manager.commit(seq)
        for index, digest in enumerate(seq.block_hashes[: seq.num_committed_blocks]):
            self.full[digest] = self.content[seq.block_table[index]].copy()
        self.parents.update(pairwise(reversed(seq.block_hashes)))

    def prefix(self, seq: Sequence, position: int) -> tuple[int, ...]:
        return (seq.request.cache_salt == "s", *seq.token_ids[: position + 1])

    def check_content(self, seq: Sequence) -> None:
        for position in range(seq.num_computed_tokens):
            slots = self.content[seq.block_table[position // self.size]]
            assert slots[position % self.size] == self.prefix(seq, position)

    @invariant()
    def sound(self) -> None:
        self.manager.check_integrity(self.live)
        for seq in self.live:
            self.check_content(seq)
        for digest, slot in self.manager.host._slots.items():
            assert self.host[slot] == self.full[digest]
        for digest, block_id in self.manager._cached.items():
            assert self.content[block_id] == self.full[digest]

    @invariant()
    def the_least_recently_used_go_first_and_leaves_before_what_they_hang_on(self) -> None:
        free = list(self.manager._free)
        evicted_next = [digest for block in free if (digest := self.manager._hashes[block]) is not None]
        used = [self.freed[digest] for digest in evicted_next]
        assert used == sorted(used)
        for place, digest in enumerate(evicted_next):
            assert self.parents.get(digest) not in evicted_next[:place]
        assert not any(self.manager._hashes[block] for block in free[: len(free) - len(evicted_next)])

    def teardown(self) -> None:
        for seq in getattr(self, "live", []):
            self.manager.free(seq)
        if hasattr(self, "manager"):
            self.manager.check_integrity([])
            assert self.manager.num_used_blocks == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=1500, stateful_step_count=30, deadline=None)
