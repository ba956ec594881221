"""`kernels/bench/gpu.py`, which is to run once somebody has a card: it must not be found wanting then."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fake_gpu import FakeGpu

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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, whose parts are now what a test writes into `part.py`."""
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    import gpu

    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "part.py"))
    return gpu


ROW = """
import json, os, signal, time
print(json.dumps({"what": "one", "figure": 2.0, "unit": "ms"}), flush=True)
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSEGV)", "time.sleep(60)"])
def test_a_part_that_dies_or_hangs_costs_no_row_of_its_own_or_of_another(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    monkeypatch.setattr(bench, "PART_S", 5)
    (tmp_path / "part.py").write_text(ROW + end)
    first, second = bench.started("checks", (1.0, 2.0), False)
    assert (first.what, first.ok) == ("one", True)
    assert second.what.startswith("checks, with status -")
    assert not second.ok
    (tmp_path / "part.py").write_text(ROW)
    assert len(list(bench.started("checks", (1.0, 2.0), False))) == 1


def test_graphs_are_compared_with_eager_steps(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_decoding
    from gpu_limits import Limits

    fake = FakeGpu()
    monkeypatch.setattr(gpu_decoding, "open_gpu", lambda _: fake)
    with torch.inference_mode():
        rows = list(gpu_decoding.rows(torch.device("cpu"), Limits(1e9, 1e12), toy=True))
    checks = {row.what: row for row in rows if row.is_check}
    assert checks.keys() == {"graph against eager, 1", "graph against eager, 3"}
    assert all(row.figure < 1e-6 for row in checks.values())
    assert sum(row.what.startswith("decode step without a graph") for row in rows) == 2
    assert {1, 3} <= {*fake.captured}
    assert len(fake.replayed) > 2 * gpu_decoding.SMALL.steps


def test_an_error_ends_a_group_of_rows_and_no_more(
    bench: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    from gpu_report import Row, guarded

    def rows() -> Iterator[Any]:
        yield Row("one", 1.0, "ms")
        raise ValueError("out of luck")

    first, second = guarded("some", rows())
    assert first.what == "one"
    assert (second.what, second.figure, second.ok) == ("some: ended early", math.inf, False)
    assert "ValueError: out of luck" in capfd.readouterr().err
