"""Everything that a GPU has to show, in one run of a few minutes from a bare checkout: that each kernel is
right, and how near the card's own limits the fast ones come. It needs torch, triton and transformers, and no
network: weights are random, of Llama 2 7B's shape.

    python kernels/bench/gpu.py --json gpu.json
    python kernels/bench/gpu.py --dry-run          on a CPU, at toy size, by Triton's interpreter

Exits with 1 where a kernel is wrong or a goal is missed; a dry run measures the CPU, and has no goals.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="to the end on a CPU, at toy size")
    parser.add_argument("--json", type=Path, help="the same as JSON, in this file")
    args = parser.parse_args()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    for root in ("kernels", "backend"):
        sys.path.insert(0, str(ROOT / root))
    import torch
    import triton

    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; try --dry-run")
    card = "CPU, interpreted" if args.dry_run else torch.cuda.get_device_name()
    began_s = time.perf_counter()
    print(f"{card}; torch {torch.__version__}, triton {triton.__version__}", flush=True)

    import gpu_checks
    import gpu_decoding
    import gpu_limits
    from gpu_report import Row

    torch.manual_seed(0)
    device = torch.device("cpu" if args.dry_run else "cuda")

    rows, failed = [], []
    with torch.inference_mode():
        limits = gpu_limits.measure(device, toy=args.dry_run)
        parts: dict[str, Callable[[], Iterable[Row]]] = {
            "limits": limits.rows,
            "checks": partial(gpu_checks.rows, device, args.dry_run),
            "attention": partial(gpu_limits.attention_rows, device, limits, args.dry_run),
            "decoding": partial(gpu_decoding.rows, device, limits, args.dry_run),
            "transformers": partial(gpu_decoding.transformers_rows, device, limits, args.dry_run),
        }
        for name, part in parts.items():
            try:
                for measured in part():
                    row = replace(measured, goal=None) if args.dry_run and not measured.is_check else measured
                    rows.append(row)
                    print(row, flush=True)
            except Exception:  # a card is rare: what the other parts show is wanted all the same
                traceback.print_exc()
                failed.append(f"{name} ended early")
    took_s = time.perf_counter() - began_s
    print(f"{took_s:.0f} s")
    if args.json:
        about = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "took_s": took_s}
        args.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    failed += [row.what for row in rows if not row.ok]
    if failed:
        sys.exit("not reached: " + "; ".join(failed))


if __name__ == "__main__":
    main()
