"""The directory's part of the prefix cache: what is saved when, and what becomes of sequences through it."""

import pytest

from octavo.engine import disk_blocks
from octavo.engine.disk_blocks import DiskBlocks
from octavo.errors import StepFailed
from octavo.protocol import BlockFile, StepPlan
from scheduling import Run

TEXT = [5, 3, 1, 2] * 4


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def files(text: str, *block_ids: int) -> tuple[BlockFile, ...]:
    return tuple(BlockFile(id, name.hex()) for id, name in zip(block_ids, names(text), strict=True))


def restarted(before: Run) -> Run:
    """A new engine that finds the files of another one."""
    run = Run(has_directory=True)
    run.executor.files, run.executor._written = before.executor.files, before.executor._written
    return run


def ended(run: Run, prompt: list[int], **params: object) -> list[StepPlan]:
    """The plans that it took."""
    before = len(run.plans)
    run.add(prompt, **params)
    run.drain()
    return run.plans[before:]


def test_a_block_is_saved_when_it_is_used_and_again_when_that_is_long_ago() -> None:
    clock = Clock()
    disk = DiskBlocks(True, clock)
    for now_s, saved in ((0, True), (1, False), (599, False), (600, True), (700, False)):
        clock.now_s = now_s
        disk.open()
        disk.use(names("abc"), [7, 8])
        assert disk.saves() == (files("ab", 7, 8) if saved else ())


def test_a_block_is_saved_when_the_device_gives_it_up_unless_it_was_before() -> None:
    disk = DiskBlocks(True)
    disk.open()
    disk.use(names("a"), [7])
    disk.open()
    for digest, block_id in ((b"a", 7), (b"b", 8), (None, 9), (b"c", 10)):
        disk.reuse(block_id, digest)
    assert disk.saves() == files("cb", 10, 8)  # heads come last into the free list
    disk.open()
    disk.reuse(7, b"d")  # another content
    assert disk.saves() == files("d", 7)


def test_a_plan_saves_so_many_and_the_others_when_they_are_used_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_blocks, "_MOST_SAVES", 2)
    disk = DiskBlocks(True)
    disk.open()
    disk.use(names("abc"), [7, 8, 9])
    disk.reuse(5, b"e")
    assert disk.saves() == files("ab", 7, 8)
    disk.open()
    disk.use(names("abc"), [7, 8, 9])
    assert disk.saves() == files("c", 9)


def test_what_was_read_goes_to_blocks_and_is_kept_until_the_next_plan() -> None:
    disk = DiskBlocks(True)
    disk.open()
    stored: dict[bytes, object] = dict.fromkeys(names("abd"), "content")
    assert disk.count(names("abcd"), stored) == 2
    assert disk.load(names("abcd"), [4, 5, 6, 7], stored) == 2
    assert disk.loads() == files("ab", 4, 5)
    assert (stored, disk._in_flight, disk.num_loaded) == ({}, ["content"] * 2, 2)
    disk.open()
    assert (disk.loads(), disk._in_flight) == ((), [])
    disk.use(names("ab"), [4, 5])
    assert disk.saves() == ()  # they came from there


def test_without_a_directory_nothing_goes_there() -> None:
    disk = DiskBlocks(False)
    disk.open()
    disk.use(names("a"), [7])
    disk.reuse(8, b"b")
    disk.discard(names("c"))
    assert (disk.saves(), disk.loads(), disk.take_discards()) == ((), (), ())


def test_a_prompt_that_comes_again_is_saved_and_read_by_a_scheduler_that_starts_anew() -> None:
    first = Run(has_directory=True)
    ended(first, [*TEXT, 1], max_tokens=2)
    assert first.executor.files == set()
    (plan, _) = ended(first, [*TEXT, 2], max_tokens=2)
    assert [block.digest for block in plan.saves] == [d.hex() for d in first.blocks._cached][:4]
    second = restarted(first)
    (plan, _) = ended(second, [*TEXT, 3], max_tokens=2)
    assert len(plan.loads) == 4
    assert [piece.start for piece in plan.slices] == [len(TEXT)]
    (plan, _) = ended(second, [*TEXT, 4], max_tokens=2)
    assert (plan.loads, plan.saves) == ((), ())
    assert [piece.start for piece in plan.slices] == [len(TEXT)]
    second.check()
    counters = second.scheduler.counters
    assert counters.prefix_hits == counters.cached_prompt_tokens == 2 * len(TEXT)


def test_those_who_come_together_read_once_and_wait_for_it() -> None:
    first = Run(has_directory=True)
    for number in range(2):
        ended(first, [*TEXT, number], max_tokens=1)
    second = restarted(first)
    for number in range(5):
        second.add([*TEXT, number], max_tokens=2)
    second.drain()
    second.check()
    assert [len(plan.loads) for plan in second.plans if plan.loads] == [4]
    assert sum(plan.num_tokens for plan in second.plans) == 5 * 2


def test_a_step_that_loads_much_admits_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(has_directory=True)
    prompts = [[number, *TEXT] for number in range(4)]
    for prompt in (*prompts, *prompts):
        ended(first, prompt, max_tokens=1)
    monkeypatch.setattr(disk_blocks, "_ENOUGH_LOADS", 5)
    second = restarted(first)
    for prompt in prompts:
        second.add(prompt, max_tokens=4)
    second.drain()
    second.check()
    assert [len(plan.loads) for plan in second.plans][:3] == [8, 8, 0]


def test_what_a_nan_may_have_touched_is_deleted() -> None:
    run = Run(has_directory=True)
    for number in range(2):
        ended(run, [*TEXT, number], max_tokens=1)
    assert len(run.executor.files) == 4
    (seq_id,) = run.add([*TEXT, 2], max_tokens=1)
    run.executor.nan_rows = {seq_id}
    run.step()
    run.scheduler.finish(seq_id)
    ended(run, [1, 2, 3], max_tokens=1)
    assert run.executor.files == set()


def test_a_step_that_fails_publishes_nothing_of_what_it_was_to_load() -> None:
    first = Run(has_directory=True)
    for number in range(2):
        ended(first, [*TEXT, number], max_tokens=1)
    second = restarted(first)
    (seq_id,) = second.add([*TEXT, 2], max_tokens=1)
    second.executor.fail_next = True
    with pytest.raises(StepFailed, match="made to fail"):
        second.step()
    second.scheduler.finish(seq_id)
    assert second.blocks.num_cached_blocks == 0
    second.add([*TEXT, 3], max_tokens=1)
    second.drain()
    second.check(2)


def test_what_is_cached_is_listed_by_last_use_and_heads_before_tails() -> None:
    run = Run(has_directory=True)
    ended(run, [1] * 8, max_tokens=1)
    ended(run, [2] * 8, max_tokens=1)
    run.add([3] * 8, max_tokens=5)
    run.step()
    names = {digest.hex(): block_id for digest, block_id in run.blocks._cached.items()}
    listed = run.blocks.cached_blocks()
    assert {block.digest: block.block_id for block in listed}.items() <= names.items()
    assert [list(names).index(block.digest) for block in listed] == [2, 3, 0, 1]
    run.drain()
