"""A model's process ends when its server is gone, whatever its threads do, and so does what watches it."""

import os
import subprocess
import sys
import time

import pytest

from octavo.serving.parent_watch import ParentWatch
from processes import children, runs

# Waits in C code that keeps Python's lock, as a metric that is written to a dead server does.
_KEEPS_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(600)"
_CHILD = """
import time
from octavo.serving.parent_watch import ParentWatch
ParentWatch().start()
print("watching", flush=True)
"""
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("hangs", ["time.sleep(600)", _KEEPS_THE_LOCK], ids=["sleeps", "keeps the lock"])
def test_the_process_ends_when_its_parent_is_gone(hangs: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD + hangs], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(1.5)  # longer than it looks away
        (watcher,) = children(pid)
        assert runs(pid)
        parent.kill()
    for process in (pid, watcher):
        deadline = time.monotonic() + 30
        while runs(process):
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.1)


def test_a_watch_that_is_closed_leaves_no_process() -> None:
    pid = os.getpid()
    before = children(pid)
    watch = ParentWatch()
    watch.start()
    assert len(children(pid)) == len(before) + 1
    watch.close()
    assert children(pid) == before
