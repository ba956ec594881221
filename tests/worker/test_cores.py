"""Cores that may be used, from made-up /proc and /sys folders."""

import os
from pathlib import Path

import pytest

from octavo.worker.cores import usable_cores


@pytest.fixture(autouse=True)
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(root: Path, groups: str, **files: str) -> None:
    """`files` by path under /sys/fs/cgroup, with `__` for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, content in files.items():
        folder, _, name = path.rpartition("__")
        file = root / "sys/fs/cgroup" / folder.replace("__", "/") / name.replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")


def test_without_control_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


def test_the_tightest_group_binds_and_part_of_a_core_counts_as_one(tmp_path: Path) -> None:
    write(tmp_path, "0::/pod/box\n", pod__box__cpu_max="max 100000", pod__cpu_max="250000 100000")
    assert usable_cores(tmp_path) == 3


def test_a_share_below_one_core_is_one(tmp_path: Path) -> None:
    write(tmp_path, "0::/\n", cpu_max="50000 100000")
    assert usable_cores(tmp_path) == 1


def test_version_1_says_minus_one_for_no_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        "5:cpu,cpuacct:/box\n4:memory:/box\n",
        cpu__cpu_cfs_quota_us="-1",
        cpu__cpu_cfs_period_us="100000",
        cpu__box__cpu_cfs_quota_us="400000",
        cpu__box__cpu_cfs_period_us="100000",
    )
    assert usable_cores(tmp_path) == 4


def test_a_quota_larger_than_the_machine_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "0::/box\n", box__cpu_max="6400000 100000")
    assert usable_cores(tmp_path) == 8
