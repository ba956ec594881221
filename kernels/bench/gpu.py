"""Everything that a GPU has to show, in one run of a few minutes from a bare checkout: that each kernel is
right, and how near the card's own limits the fast ones come. It needs torch, triton and transformers, and no
network: weights are random, of Llama 2 7B's shape.

    python kernels/bench/gpu.py --json gpu.json
    python kernels/bench/gpu.py --dry-run          on a CPU, at toy size, by Triton's interpreter

Each part is a process of its own, since an address that is not there is the end of all CUDA in a process: a
card is rare, and what the other parts show is wanted all the same.

Exits with 1 where a kernel is wrong or a goal is missed; a dry run measures the CPU, and has no goals.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "backend")]
PARTS = ("limits", "checks", "attention", "decoding", "transformers")
PART_S = 200  # of one that hangs

if TYPE_CHECKING:
    import torch
    from gpu_report import Row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="to the end on a CPU, at toy size")
    parser.add_argument("--json", type=Path, help="the same as JSON, in this file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process, a row a line
    parser.add_argument("--limits", type=float, nargs=2, default=(math.nan, math.nan), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        for row in rows_of(args.part, args.limits, args.dry_run):
            print(json.dumps(asdict(row)), flush=True)
        return

    import torch
    import triton
    from gpu_report import Row

    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; try --dry-run")
    card = "CPU, interpreted" if args.dry_run else torch.cuda.get_device_name()
    about = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
    print(", ".join(about.values()), flush=True)
    began_s = time.perf_counter()
    rows: list[Row] = []
    limits = args.limits
    for part in PARTS:
        for row in started(part, limits, args.dry_run):
            rows.append(row)
            print(row, flush=True)
        if part == "limits" and len(rows) == 2:
            limits = rows[0].figure * 1e9, rows[1].figure * 1e12
        if args.json:  # now: whoever has lent the card may end this any time
            took_s = time.perf_counter() - began_s
            report = {**about, "took_s": took_s, "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - began_s:.0f} s")
    if missed := [row.what for row in rows if not row.ok]:
        sys.exit("not reached: " + "; ".join(missed))


def started(part: str, limits: tuple[float, float], dry_run: bool) -> Iterator["Row"]:
    """The rows of a part, as they come from a process of its own."""
    from gpu_report import Row, ended_early

    command = [sys.executable, __file__, "--part", part, "--limits", *map(str, limits)]
    with subprocess.Popen(
        [*command, *(["--dry-run"] if dry_run else [])], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(PART_S, process.kill)
        timer.start()
        for line in process.stdout:
            yield Row(**json.loads(line))
        status = process.wait()
        timer.cancel()
    if status:
        yield ended_early(f"{part}, with status {status}")


def rows_of(part: str, limits: tuple[float, float], dry_run: bool) -> Iterator["Row"]:
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if part == "transformers":  # whose cache is made anew with each token, a little longer
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    torch.manual_seed(0)
    device = torch.device("cpu" if dry_run else "cuda")
    with torch.inference_mode():
        for measured in _rows(part, limits, device, dry_run):
            yield replace(measured, goal=None) if dry_run and not measured.is_check else measured


def _rows(part: str, figures: tuple[float, float], device: "torch.device", toy: bool) -> Iterator["Row"]:
    import gpu_checks
    import gpu_decoding
    import gpu_limits

    limits = gpu_limits.Limits(*figures)
    match part:
        case "limits":
            return gpu_limits.rows(device, toy)
        case "checks":
            return gpu_checks.rows(device, toy)
        case "attention":
            return gpu_limits.attention_rows(device, limits, toy)
        case "decoding":
            return gpu_decoding.rows(device, limits, toy)
        case _:
            return gpu_decoding.transformers_rows(device, limits, toy)


if __name__ == "__main__":
    main()
