"""How many cores this process may use: those it may run on, or its control group's share where that is less.

Asked by the executor. More threads than that do not compute faster: the kernel stops all of a container's
threads, the server's too, once its share of a period is used up.
"""

import math
import os
from pathlib import Path

from octavo.worker.memory import control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """At least one; `root` is where /proc and /sys are looked for."""
    cores = len(os.sched_getaffinity(0))
    for group in control_groups(root, "cpu"):
        try:
            quota, period = _quota(group)
        except (OSError, ValueError):  # this group sets none
            continue
        cores = min(cores, math.ceil(quota / period))
    return max(cores, 1)


def _quota(group: Path) -> tuple[int, int]:
    """Microseconds of all cores together in each so many microseconds. Raises `ValueError` for no limit."""
    file = group / "cpu.max"  # version 2
    if file.exists():
        quota, period = map(int, file.read_text().split())
    else:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    if quota <= 0 or period <= 0:
        raise ValueError(quota)
    return quota, period
