"""Free memory, from made-up /proc and /sys folders."""

from pathlib import Path

import pytest

from octavo.worker.memory import available_bytes

MEMINFO = "MemTotal:       16000000 kB\nMemFree: 1000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n"


def write(root: Path, **files: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    for path, content in files.items():
        file = root / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def group(root: Path, path: str, limit: str, usage: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path)
    assert available_bytes(tmp_path) == 8_000_000 * 1024


def test_a_limit_of_a_group_around_ours_binds(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/pod/container\n")
    group(tmp_path, "pod/container", "max", 10)
    group(tmp_path, "pod", "5000000000", 2_000_000_000, inactive_file=500_000_000)
    assert available_bytes(tmp_path) == 3_500_000_000


def test_a_limit_above_the_free_memory_does_not_bind(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n")
    group(tmp_path, "", "50000000000", 1000)
    assert available_bytes(tmp_path) == 8_000_000 * 1024


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n")
    group(tmp_path, "", "1000", 2000)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize(("limit", "expected"), [("3000", 1000), (str(2**63 - 4096), 8_000_000 * 1024)])
def test_version_1_of_control_groups(tmp_path: Path, limit: str, expected: int) -> None:
    write(tmp_path, proc__self__cgroup="5:cpu,cpuacct:/box\n4:memory:/box\n")
    folder = tmp_path / "sys/fs/cgroup/memory/box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(limit)
    (folder / "memory.usage_in_bytes").write_text("2000")
    assert available_bytes(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert 2**20 < available_bytes() < 2**50
