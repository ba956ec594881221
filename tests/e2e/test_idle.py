"""What a server takes of the machine while nobody asks it anything."""

import os
import time
from pathlib import Path

from octavo.serving.launcher import RunningServer
from triton_clients import generate

WATCHED_S = 3.0
MOST_SHARE = 0.02  # of one core


def cpu_s(group: int) -> dict[int, float]:
    """User and system seconds of each process in a group: the server and its models'."""
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group:
            used[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def test_an_idle_server_leaves_the_machine_alone(server: RunningServer) -> None:
    """After a request, so that all the threads are there that computing needs; none may go on spinning."""
    assert generate(server, text_input="Once upon a time", max_tokens=8)["text_output"]
    time.sleep(0.5)
    before = cpu_s(server.process.pid)
    assert len(before) >= 2, "the server and its model"
    time.sleep(WATCHED_S)
    after = cpu_s(server.process.pid)
    shares = {pid: (after[pid] - seconds) / WATCHED_S for pid, seconds in before.items()}
    assert sum(shares.values()) < MOST_SHARE, f"of a core, by process: {shares}"
