"""Files of prefix blocks: whole or not there, whoever dies, writes or deletes; nothing else is ever read."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.block_files import SHARES, BlockFiles, DamagedFile, Payload, least_bytes

BLOCK_BYTES = 200
MODEL = b"m" * 16
FILE_BYTES = least_bytes(BLOCK_BYTES) // SHARES


def digest_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


def payload_of(number: int, num_bytes: int = BLOCK_BYTES) -> Payload:
    return np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)


def opened(
    folder: Path, *, most_files: int = 320, model: bytes = MODEL, block: int = BLOCK_BYTES
) -> BlockFiles:
    files = BlockFiles(folder / "cache", most_files * (FILE_BYTES - BLOCK_BYTES + block), model, block)
    files.make_folder()
    files.tidy()
    return files


def write(files: BlockFiles, number: int, used_ns: int | None = None) -> bool:
    if files.is_due:
        files.tidy()
    now_ns = time.time_ns()
    return files.write(digest_of(number), payload_of(number), now_ns if used_ns is None else used_ns)


def holds(files: BlockFiles, number: int) -> bool:
    payload = files.read(digest_of(number))
    return payload is not None and bool((payload == payload_of(number)).all())


def test_what_is_written_is_read_by_whoever_opens_the_directory_next(tmp_path: Path) -> None:
    files = opened(tmp_path)
    assert not files.has(digest_of(1))
    assert files.read(digest_of(1)) is None
    assert write(files, 1)
    assert not write(files, 1)
    again = opened(tmp_path)
    assert again.has(digest_of(1))
    assert holds(again, 1)
    assert holds(files, 1)
    again.delete(digest_of(1))
    again.delete(digest_of(1))
    assert files.read(digest_of(1)) is None


def test_nobody_but_the_owner_can_look_inside(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = opened(tmp_path)
        write(files, 1)
    finally:
        os.umask(before)
    path = files.path(digest_of(1))
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, files.directory)]
    assert modes == [0o600, 0o700, 0o700]
    assert files.is_private()
    files.directory.chmod(0o750)
    assert not files.is_private()


def test_models_do_not_see_each_others_blocks(tmp_path: Path) -> None:
    files, others = opened(tmp_path), opened(tmp_path, model=b"n" * 16)
    write(files, 1)
    assert others.read(digest_of(1)) is None
    others.path(digest_of(1)).write_bytes(files.path(digest_of(1)).read_bytes())
    with pytest.raises(DamagedFile):
        others.read(digest_of(1))
    larger = opened(tmp_path, block=BLOCK_BYTES + 8)
    with pytest.raises(DamagedFile):
        larger.read(digest_of(1))


def test_a_file_under_another_ones_name_is_not_read(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, 1)
    files.path(digest_of(1)).rename(files.path(digest_of(2)))
    with pytest.raises(DamagedFile):
        files.read(digest_of(2))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_and_no_cut_or_added_byte_goes_unnoticed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = opened(tmp_path_factory.mktemp("damage"))
    write(files, 1)
    path = files.path(digest_of(1))
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(("flip", "cut", "add", "zero")))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    elif kind == "add":
        content += b"\0" * (at + 1)
    else:  # as after a loss of power: the size is there, the end is not
        content[at:] = bytes(len(content) - at)
        content[at] ^= content == path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        files.read(digest_of(1))


def test_a_file_that_is_far_too_large_costs_no_memory(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with files.path(digest_of(1)).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedFile):
        files.read(digest_of(1))


def test_what_is_no_file_of_its_own_is_not_read(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, 1)
    files.path(digest_of(2)).symlink_to(files.path(digest_of(1)))
    os.mkfifo(files.path(digest_of(3)))  # opening it for reading would wait for a writer
    files.path(digest_of(4)).mkdir()
    for number in (2, 3, 4):
        with pytest.raises(OSError):
            files.read(digest_of(number))


def test_a_model_s_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / MODEL.hex()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="is a symbolic link"):
        opened(tmp_path)


def test_a_directory_that_vanishes_is_made_anew(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, 1)
    files.directory.rename(tmp_path / "gone")
    assert files.read(digest_of(1)) is None
    assert write(files, 2)
    assert holds(files, 2)


def test_what_was_used_last_stays_and_the_directory_keeps_to_its_limit(tmp_path: Path) -> None:
    files, others = opened(tmp_path, most_files=64), opened(tmp_path, most_files=64, model=b"n" * 16)
    for number in range(20):
        write(others, number, used_ns=number)
    for number in range(40):
        write(files, number, used_ns=1000 + number)
        files.touch(digest_of(0), 2000 + number)
        others.touch(digest_of(5), 2000 + number)
    for number in range(40, 300):
        write(files, number, used_ns=10_000 + number)
        files.touch(digest_of(0), 20_000 + number)
        others.touch(digest_of(5), 20_000 + number)
        found = list(files.directory.rglob("*.kv"))
        assert len(found) <= 64
        assert sum(path.stat().st_size for path in found) <= 64 * FILE_BYTES
    kept = [number for number in range(300) if holds(files, number)]
    assert kept[0] == 0
    assert kept[1:] == list(range(301 - len(kept), 300))
    assert len(kept) >= 50
    assert [number for number in range(20) if others.has(digest_of(number))] == [5]


def test_tidying_leaves_alone_what_is_not_ours_and_clears_up_what_is(tmp_path: Path) -> None:
    files = opened(tmp_path)
    write(files, 1)
    folder = files.path(digest_of(1)).parent
    (files.directory / "notes.txt").write_text("mine")
    (files.directory / "photos").mkdir()
    (folder / "readme").write_text("mine too")
    (files.directory / ("0" * 32)).mkdir()  # of a model that has nothing left
    dead = folder / f"{digest_of(2).hex()}.{'0' * 16}.tmp"
    fresh = folder / f"{digest_of(3).hex()}.{'0' * 16}.tmp"
    for path in (dead, fresh):
        path.write_bytes(b"half")
    os.utime(dead, (time.time() - 3600,) * 2)
    assert files.tidy() == 3
    left = {path.name for path in files.directory.rglob("*")}
    assert left == {folder.name, f"{digest_of(1).hex()}.kv", fresh.name, "notes.txt", "photos", "readme"}


WRITER = """
import sys, time
from hashlib import blake2b
from pathlib import Path
import numpy as np
from octavo.worker.block_files import BlockFiles
directory, model = Path(sys.argv[1]) / "cache", bytes.fromhex(sys.argv[2])
most_bytes, block_bytes, first, end = map(int, sys.argv[3:])
files = BlockFiles(directory, most_bytes, model, block_bytes)
print("ready", flush=True)
for number in range(first, end):
    if files.is_due:
        files.make_folder()
        files.tidy()
    digest = blake2b(b"%d" % number, digest_size=16).digest()
    payload = np.random.default_rng(number).integers(0, 256, block_bytes, np.uint8)
    files.write(digest, payload, time.time_ns())
"""


def writing(folder: Path, most_files: int, numbers: range) -> "subprocess.Popen[str]":
    """A process that writes the blocks of these numbers."""
    arguments = (folder, MODEL.hex(), most_files * FILE_BYTES, BLOCK_BYTES, numbers.start, numbers.stop)
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def wait_for_start(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_two_processes_write_delete_and_read_the_same_files(tmp_path: Path) -> None:
    with writing(tmp_path, 64, range(250)) as one, writing(tmp_path, 64, range(250)) as other:
        wait_for_start(one)
        wait_for_start(other)
        files = opened(tmp_path, most_files=64)
        most = num_read = 0
        while one.poll() is None or other.poll() is None:
            for number in range(0, 250, 7):
                num_read += holds(files, number) or files.has(digest_of(number))
            most = max(most, len(list(files.directory.rglob("*.kv"))))
        assert (one.returncode, other.returncode) == (0, 0)
    assert 0 < most <= 64
    assert num_read > 0
    assert all(files.read(digest_of(number)) is None or holds(files, number) for number in range(250))


def test_a_process_that_is_killed_leaves_nothing_that_is_read_wrongly(tmp_path: Path) -> None:
    for turn in range(3):
        with writing(tmp_path, 3200, range(100_000 * turn, 100_000 * (turn + 1))) as process:
            wait_for_start(process)
            time.sleep(0.05 + 0.03 * turn)
            process.send_signal(signal.SIGKILL)
    files = opened(tmp_path, most_files=3200)
    found = list(files.directory.rglob("*.kv"))
    assert found
    for path in found:
        assert files.read(bytes.fromhex(path.stem)) is not None
    assert len(list(files.directory.rglob("*.tmp"))) <= 3


def test_a_disk_that_is_full_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write(files, 1)
    monkeypatch.setattr(Path, "rename", rename)
    assert list(files.directory.rglob("*.*")) == []
    with contextlib.suppress(OSError):
        write(files, 1)
    assert holds(files, 1)
