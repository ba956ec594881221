"""`kernels/bench/gpu.py`, which is to run once somebody has a card: it must not be found wanting then."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "kernels" / "bench" / "gpu.py"


def test_a_dry_run_checks_every_kernel_and_ends(tmp_path: Path) -> None:
    written = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(written)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(written.read_text())
    assert report["card"] == "CPU, interpreted"
    rows = {row["what"]: row for row in report["rows"]}
    for kernel in ("rms_norm", "silu_and_mul", "attention", "sample", "token_logprobs", "copy_blocks"):
        checks = [row for what, row in rows.items() if what.startswith(kernel) and row["is_check"]]
        assert checks
        assert all(0 <= row["figure"] <= row["goal"] for row in checks)
    for what in (
        "copy on the device",
        "decode attention",
        "prefill attention",
        "decode step",
        "the same by Tr",
    ):
        assert [row for name, row in rows.items() if name.startswith(what) and row["figure"] > 0]
