"""A model's process whose main thread hangs still ends when its server is gone."""

import subprocess
import sys
import time
from pathlib import Path

_CHILD = """
import time
from octavo.serving.parent_watch import ParentWatch
ParentWatch().start()
print("watching", flush=True)
time.sleep(600)
"""
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_when_its_parent_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}")
        time.sleep(1.5)  # longer than it looks away
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)


def _runs(process: Path) -> bool:
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
