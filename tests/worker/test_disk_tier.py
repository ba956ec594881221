"""The prefix cache's directory: nothing raises, nobody waits, and each kind of trouble is said once."""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from octavo.worker import disk_tier
from octavo.worker.block_files import BlockFiles, Payload, least_bytes
from octavo.worker.disk_tier import DiskTier
from waiting import wait_until

BLOCK_BYTES = 128
SOON_S = 60.0


def blocks_of(*numbers: int) -> list[tuple[bytes, Payload]]:
    return [
        (blake2b(b"%d" % n, digest_size=16).digest(), np.full(BLOCK_BYTES, n % 251, np.uint8))
        for n in numbers
    ]


def files_in(folder: Path) -> BlockFiles:
    return BlockFiles(folder, least_bytes(BLOCK_BYTES) * 10, b"m" * 16, BLOCK_BYTES)


@contextmanager
def tier(folder: Path) -> Iterator[DiskTier]:
    opened = DiskTier(files_in(folder))
    yield opened
    opened.close(SOON_S)


def load(tier: DiskTier, *numbers: int, patience_s: float = SOON_S) -> list[int]:
    digests = [digest for digest, _ in blocks_of(*numbers)]
    return [int(payload[0]) for payload in tier.load(digests, time.monotonic() + patience_s)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_saved_is_loaded_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as one:
        one.save(blocks_of(1, 2, 3, 5))
    with tier(tmp_path / "cache") as other:
        assert load(other, 1, 2, 3, 4, 5) == [1, 2, 3]
        assert load(other, 4, 5) == []
        assert load(other, 5) == [5]
        assert load(other, 1, patience_s=0) == []
        assert (one.counts().saved, other.counts().saved, other.counts().loaded) == (4, 0, 4)
        other.save(blocks_of(1))
    assert other.counts().saved == 0


def test_a_head_outlives_its_tail_and_loading_counts_as_use(tmp_path: Path) -> None:
    def by_age() -> list[int]:
        paths = sorted((tmp_path / "cache").rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_bytes()[-1] for path in paths]

    with tier(tmp_path / "cache") as one:
        one.save(blocks_of(1, 2, 3))
        one.save(blocks_of(4, 5))
    assert by_age() == [3, 2, 1, 5, 4]
    with tier(tmp_path / "cache") as other:
        assert load(other, 1, 2) == [1, 2]
        other.save(blocks_of(5))
    assert by_age() == [3, 4, 2, 1, 5]


def test_who_needs_what_another_one_holds_is_given_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier(tmp_path) as one:
        one.save(blocks_of(*range(10)))
    monkeypatch.setattr(disk_tier, "_MOST_LOADED_BYTES", 4 * BLOCK_BYTES)
    digests = [digest for digest, _ in blocks_of(*range(10))]
    with tier(tmp_path) as other:
        first = other.load(digests, time.monotonic() + SOON_S)
        second = other.load(digests, time.monotonic() + SOON_S)
        assert len(first) == len(second) == 4
        assert all(this is that for this, that in zip(first, second, strict=True))
        assert load(other, 9) == []
        del first, second
        assert load(other, 9) == [9]


def test_damaged_files_are_deleted_with_one_line_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier(tmp_path) as one:
        one.save(blocks_of(1, 2, 3))
    files = files_in(tmp_path)
    paths = [files.path(digest) for digest, _ in blocks_of(1, 2, 3)]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    tmp_path.chmod(0o700)
    caplog.clear()
    with tier(tmp_path) as other:
        assert [load(other, number) for number in (1, 2, 3)] == [[], [], []]
        assert other.counts().damaged == 3
    assert not any(path.exists() for path in paths)
    (line,) = warnings(caplog)
    assert line.startswith(f"{paths[0]} is damaged")


def test_what_is_distrusted_is_deleted_even_when_it_is_yet_to_be_written(tmp_path: Path) -> None:
    with tier(tmp_path) as one:
        one.save(blocks_of(1, 2))
        one.discard([digest for digest, _ in blocks_of(2, 3)])
    with tier(tmp_path) as other:
        held = other.load([blocks_of(1)[0][0]], time.monotonic() + SOON_S)
        other.discard([blocks_of(1)[0][0]])
        wait_until(lambda: load(other, 1) == [], timeout_s=SOON_S)
        assert load(other, 2) == []
        assert held[0][0] == 1


def test_strangers_in_the_directory_and_open_doors_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    with tier(tmp_path) as one:
        one.save(blocks_of(*range(400)))  # more than once around the limit
    assert one.counts().saved == 400
    assert sorted(line.split(str(tmp_path))[1] for line in warnings(caplog)) == [
        " has 1 entries that are not the cache's: they are left alone, and do not count towards its size",
        " is open to others than its owner, who can tell prompts from what is in it, or change answers; "
        "chmod 700 closes it",
    ]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_that_cannot_be_used_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with tier(tmp_path / "file" / "cache") as one:
        one.save(blocks_of(1, 2, 3))
        assert load(one, 1) == []
        assert not one.has(b"1" * 16)
    assert one.counts().dropped == 3
    assert {line.split(" cannot ")[1].split(":")[0] for line in warnings(caplog)} == {
        "be prepared",
        "be written to",
        "be read from",
    }
    assert len(warnings(caplog)) == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_is_said_once_and_taken_again_when_it_does_not(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = threading.Event()
    really_open = os.open

    def open_unless(path: str | Path, flags: int, *args: int) -> int:
        if refuses.is_set() and flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return really_open(path, flags, *args)

    monkeypatch.setattr(os, "open", open_unless)
    with tier(tmp_path / "cache") as one:
        refuses.set()
        one.save(blocks_of(1, 2, 3))
        wait_until(lambda: one.counts().dropped == 3, timeout_s=SOON_S)
        refuses.clear()
        one.save(blocks_of(4))
    assert one.counts().saved == 1
    (line,) = warnings(caplog)
    assert f"cannot be written to: {os.strerror(code)}; blocks are computed instead" in line
    assert sorted(path.suffix for path in (tmp_path / "cache").rglob("*.*")) == [".kv"]


def test_a_disk_that_is_behind_drops_blocks_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_MOST_QUEUED_BYTES", 3 * BLOCK_BYTES)
    goes_on, writes = threading.Event(), BlockFiles.write

    def slow_write(*args: object) -> bool:
        goes_on.wait()
        return writes(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "write", slow_write)
    with tier(tmp_path / "cache") as one:
        one.save(blocks_of(0))
        wait_until(lambda: not one._jobs, timeout_s=SOON_S)  # it is being written
        begin_s = time.monotonic()
        one.save(blocks_of(*range(1, 10)))
        assert one.counts().dropped == 6
        one.save(blocks_of(10), until_s=time.monotonic() + 0.05)
        assert one.counts().dropped == 7
        assert time.monotonic() - begin_s < SOON_S
        threading.Timer(0.05, goes_on.set).start()
        one.save(blocks_of(11, 12, 13), until_s=time.monotonic() + SOON_S)  # waits for room
    assert one.counts().saved == 7
    with tier(tmp_path / "cache") as other:
        assert [number for number in range(14) if load(other, number)] == [0, 1, 2, 3, 11, 12, 13]


def test_closing_waits_no_longer_than_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, writes, written = threading.Event(), BlockFiles.write, []

    def slow_write(*args: object) -> bool:
        written.append(args)
        goes_on.wait()
        return writes(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFiles, "write", slow_write)
    one = DiskTier(files_in(tmp_path / "cache"))
    one.save(blocks_of(1, 2, 3))
    one.close(0.05)
    one.save(blocks_of(4))
    goes_on.set()
    wait_until(lambda: not one._thread.is_alive(), timeout_s=SOON_S)
    assert len(written) == 1
