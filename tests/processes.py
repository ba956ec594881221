"""Where the servers that tests start listen, and what /proc and /dev/shm say of them."""

import contextlib
import os
from pathlib import Path
from typing import Any

from octavo.serving.launcher import SHARED_MEMORY, LaunchOptions, RunningServer
from ports import free_ports


def launch_options(repository: Path, **options: Any) -> LaunchOptions:
    """On ports that nobody uses."""
    http, grpc, metrics = free_ports(3)
    chosen = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, **options}
    return LaunchOptions(repository, **chosen)


def children(parent: int) -> list[int]:
    """Those that have ended and were not waited for included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status, such as State, Threads and VmRSS; none of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def resident_bytes(pid: int) -> int:
    return 1024 * int(status(pid)["VmRSS"].split()[0])


def num_threads(pid: int) -> int:
    return int(status(pid)["Threads"])


def runs(pid: int) -> bool:
    """Whether it is there and has not ended."""
    return not status(pid).get("State", "Z").startswith("Z")


def zombies(parent: int) -> list[int]:
    return [pid for pid in children(parent) if status(pid).get("State", "").startswith("Z")]


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def regions(server: RunningServer) -> list[Path]:
    """Its files in shared memory."""
    return list(SHARED_MEMORY.glob(f"{server.options.shm_prefix}*"))
