"""The GPU kernels by Triton's interpreter: each file of `tests/interpreted` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "interpreted").glob("test_*.py"))
TIMEOUT_S = 280  # below pytest's own, so that the output is shown


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("test_"))
def test_interpreted(path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("OCTAVO_KERNELS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout
