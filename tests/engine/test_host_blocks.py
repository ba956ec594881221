"""The host's part of the prefix cache: which slot holds what, and what becomes of sequences through it."""

from typing import Any

import pytest

from octavo.engine.host_blocks import HostBlocks
from octavo.errors import StepFailed
from octavo.protocol import Swap
from scheduling import Run


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def saved(host: HostBlocks, text: str) -> None:
    """Each letter's block was evicted in a step that ran."""
    host.open()
    for number, digest in enumerate(names(text)):
        host.save(digest, number)
    host.confirm()


def test_who_was_used_longest_ago_gives_up_its_slot() -> None:
    host = HostBlocks(3)
    saved(host, "abc")
    host.open()
    assert len(host.hold(names("ab"))) == 2
    host.load([0, 1], [7, 8])
    host.confirm()
    saved(host, "d")  # c was used before a and b were read
    assert [host.count(names(letter)) for letter in "abcd"] == [1, 1, 0, 1]
    saved(host, "be")  # b is there already, and was left by the device just now: e takes the slot of a
    assert [host.count(names(letter)) for letter in "abde"] == [0, 1, 1, 1]
    host.check_integrity()


def test_the_head_of_what_was_read_outlives_its_tail() -> None:
    host = HostBlocks(3)
    saved(host, "abc")
    host.open()
    host.load(host.hold(names("abc")), [7, 8, 9])
    host.confirm()
    saved(host, "x")
    assert host.count(names("abc")) == 2
    saved(host, "y")
    assert host.count(names("abc")) == 1


def test_a_slot_that_is_read_is_not_written_in_the_same_plan() -> None:
    host = HostBlocks(2)
    saved(host, "ab")
    host.open()
    slots = host.hold(names("ab"))
    host.save(b"c", 5)
    host.load(slots, [7, 8])
    assert host.swaps() == ((), (Swap(7, slots[0]), Swap(8, slots[1])))
    assert host.count([b"c"]) == 0
    host.confirm()
    host.open()
    host.load(host.hold(names("a")), [9])
    host.save(b"c", 5)  # b is not read in this plan
    assert host.swaps() == ((Swap(5, slots[1]),), (Swap(9, slots[0]),))
    host.confirm()
    assert [host.count(names(letter)) for letter in "abc"] == [1, 0, 1]


def test_of_more_blocks_than_slots_in_one_plan_the_last_ones_stay() -> None:
    host = HostBlocks(2)
    host.open()
    for number, digest in enumerate(names("cba")):  # as the device evicts: tails first
        host.save(digest, number)
    swaps_out, _ = host.swaps()
    assert sorted(swap.block_id for swap in swaps_out) == [1, 2]
    assert len({swap.slot for swap in swaps_out}) == 2
    assert host.count(names("abc")) == 2
    host.check_integrity()


def test_what_was_never_copied_is_forgotten() -> None:
    host = HostBlocks(2)
    saved(host, "a")
    host.open()
    host.save(b"b", 1)
    host.save(b"c", 2)  # takes the place of a
    assert host.count([b"c"]) == 1  # to be read in the same plan, after it is written
    host.open()
    assert host.num_used_blocks == 0
    assert [host.count(names(letter)) for letter in "abc"] == [0, 0, 0]
    assert (host.num_swapped_out, host.num_swapped_in) == (1, 0)
    host.check_integrity()


def test_what_is_discarded_is_gone_and_its_slot_is_free() -> None:
    host = HostBlocks(2)
    saved(host, "ab")
    host.discard(names("bx"))
    assert host.count(names("b")) == 0
    saved(host, "c")
    assert host.count(names("a")) == host.count(names("c")) == 1


# Below: sequences. Blocks of 4 tokens.
LONG = list(range(30))


def blocks_moved(run: Run) -> tuple[int, int]:
    """Out and in."""
    return sum(len(plan.swaps_out) for plan in run.plans), sum(len(plan.swaps_in) for plan in run.plans)


def evict_all(run: Run) -> None:
    """Others take all blocks of the device."""
    most = run.blocks.num_blocks * run.config.block_size
    while most > 0:
        run.add([49 - len(run.requests)] * min(most, 39), max_tokens=1)
        most -= 39
    run.drain()


def test_an_evicted_prefix_comes_back_instead_of_being_computed() -> None:
    run = Run(num_blocks=12, num_host_blocks=20)
    run.add(LONG, max_tokens=1)
    evict_all(run)
    before = run.executor.computed_tokens
    (again,) = run.add([*LONG, 40], max_tokens=5)
    run.drain()
    run.check()
    counters, host = run.scheduler.counters, run.blocks.host
    assert run.executor.computed_tokens - before == 31 - 28 + 4
    assert counters.cached_prompt_tokens == counters.prefix_hits == 28
    assert host.num_swapped_in == 7
    assert (host.num_swapped_out, host.num_swapped_in) == blocks_moved(run)
    assert run.tokens[again]


def test_a_preempted_sequence_computes_only_its_last_block_anew() -> None:
    run = Run(num_blocks=12, num_host_blocks=12, max_num_seqs=2)
    run.add([1] * 10, max_tokens=30)
    run.add([2] * 10, max_tokens=30)
    run.drain()
    run.check()
    assert run.scheduler.counters.preemptions == 1
    assert run.blocks.host.num_swapped_in > 0
    assert 78 <= run.executor.computed_tokens < 78 + 4  # the last token of each is not computed
    alone = Run(num_blocks=12, max_num_seqs=2)
    alone.add([1] * 10, max_tokens=30)
    alone.add([2] * 10, max_tokens=30)
    alone.drain()
    assert alone.executor.computed_tokens > 90


def test_evicting_what_the_host_has_already_copies_nothing() -> None:
    run = Run(num_blocks=10, num_host_blocks=40)
    for _ in range(4):
        run.add([*LONG, 40], max_tokens=1)
        run.drain()
        run.add([*reversed(LONG), 40], max_tokens=1)
        run.drain()
    run.check()
    out, came_back = blocks_moved(run)
    assert came_back >= 6 * 5
    assert out <= 2 * 7


def test_requests_that_come_together_bring_a_prefix_in_once() -> None:
    run = Run(num_blocks=13, num_host_blocks=40)
    run.add(LONG, max_tokens=1)
    evict_all(run)
    for number in range(4):
        run.add([*LONG[:28], 30 + number], max_tokens=1)
    plan = run.step()
    assert plan is not None
    assert (len(plan.slices), len(plan.swaps_in)) == (1, 7)
    plan = run.step()
    assert plan is not None
    assert (len(plan.slices), len(plan.swaps_in)) == (3, 0)
    run.drain()
    run.check()
    assert run.blocks.host.num_swapped_in * 4 == 28
    assert run.scheduler.counters.prefix_hits == 4 * 28


def test_a_block_may_leave_and_come_back_in_one_plan() -> None:
    run = Run(num_blocks=13, num_host_blocks=10, max_num_batched_tokens=64)
    for prompt in (LONG[:20], [41] * 20):
        run.add(prompt, max_tokens=1)
        run.drain()
    run.add([40] * 20, max_tokens=1)  # takes the three that hold nothing, and two at the end of the first
    run.add(LONG[:20], max_tokens=1)  # two of the second, for one that the last has just driven out
    plan = run.step()
    assert plan is not None
    assert (len(plan.slices), len(plan.swaps_out), len(plan.swaps_in)) == (2, 4, 1)
    assert plan.swaps_in[0].slot in [swap.slot for swap in plan.swaps_out]
    run.drain()
    run.check()


def test_a_step_that_fails_leaves_nothing_that_was_not_copied() -> None:
    run = Run(num_blocks=12, num_host_blocks=20)
    run.add(LONG, max_tokens=1)
    run.drain()
    run.add([41] * 39, max_tokens=1)
    plan = run.scheduler.schedule()
    assert plan is not None
    assert plan.swaps_out
    run.executor.fail_next = True
    with pytest.raises(StepFailed):
        run.executor.submit(plan)
    run.scheduler.finish(2)
    run.scheduler.check_integrity()
    again = run.add(LONG, max_tokens=3)
    run.drain()
    run.check(*again)
    assert run.blocks.host.num_swapped_in == 0
    evict_all(run)
    (third,) = run.add(LONG, max_tokens=3)
    plan = run.scheduler.schedule()
    assert plan is not None
    assert len(plan.swaps_in) == 7
    run.executor.fail_next = True
    with pytest.raises(StepFailed):
        run.executor.submit(plan)
    run.scheduler.finish(third)
    assert run.blocks.host.count(run.blocks.host._slots) == run.blocks.host.num_used_blocks
    fourth = run.add(LONG, max_tokens=3)
    run.drain()
    run.check(*fourth)
    assert run.blocks.host.num_swapped_in == 7


def test_a_row_of_nan_takes_its_blocks_out_of_the_host_too() -> None:
    run = Run(num_blocks=12, num_host_blocks=20)
    run.add(LONG, max_tokens=1)
    evict_all(run)
    (bad,) = run.add(LONG, max_tokens=3)
    run.executor.nan_rows.add(bad)
    run.drain()
    assert run.blocks.host.num_swapped_in == 7
    hits = run.scheduler.counters.prefix_hits
    (good,) = run.add(LONG, max_tokens=3)
    run.drain()
    run.check(good)
    assert run.scheduler.counters.prefix_hits == hits
    assert run.blocks.host.num_swapped_in == 7


@pytest.mark.parametrize(
    "config", [{"preemption_mode": "recompute"}, {"enable_prefix_caching": False}], ids=str
)
def test_where_nothing_is_to_be_swapped_nothing_is(config: dict[str, Any]) -> None:
    run = Run(num_blocks=12, num_host_blocks=20, max_num_seqs=2, **config)
    run.add([1] * 10, max_tokens=30)
    run.add([2] * 10, max_tokens=30)
    run.drain()
    run.check()
    assert run.scheduler.counters.preemptions > 0
    assert blocks_moved(run) == (0, 0)
    assert run.blocks.host.num_used_blocks == 0


def test_a_prompt_that_is_computed_whole_is_not_copied_in() -> None:
    run = Run(num_blocks=12, num_host_blocks=20)
    run.add(LONG, max_tokens=1)
    evict_all(run)
    before = run.executor.computed_tokens
    run.add(LONG, max_tokens=1, prompt_logprobs=1)
    run.drain()
    assert run.executor.computed_tokens - before == len(LONG)
    assert run.blocks.host.num_swapped_in == 0


def test_sjf_counts_what_the_host_has_as_computed() -> None:
    run = Run(num_blocks=12, num_host_blocks=20, max_num_seqs=1, scheduling_policy="sjf")
    run.add(LONG, max_tokens=1)
    evict_all(run)
    (short,) = run.add([40] * 10, max_tokens=1)
    (warm,) = run.add([*LONG, 41], max_tokens=1)
    run.drain()
    run.check()
    order = [plan.slices[0].seq_id for plan in run.plans]
    assert order.index(warm) < order.index(short)
