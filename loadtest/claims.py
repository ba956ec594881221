"""What the memory system and the scheduler claim to gain, on and off side by side, one figure a command.

    python loadtest/claims.py waste            print the table
    python loadtest/claims.py waste --write    and put it into backend/docs/claims.md

A claim stands in `CLAIMS` by its name, and in the document between two marks of that name.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config import EngineConfig
from roofline import CARDS, SHAPES
from simulate import Replay
from simulation_report import Report
from traces import MIXED, load

DOCUMENT = Path(__file__).parents[1] / "backend" / "docs" / "claims.md"

WASTE_GOAL = 0.96  # of the allocated memory holds tokens
WASTE_MAX_MODEL_LEN = 2048
WASTE_REQUESTS_AT_MOST_LENGTH = 64  # that the cache is given room for


@dataclass(frozen=True)
class Result:
    """A claim as measured: the table in Markdown, and whether its goal is met."""

    table: str
    met: bool


@dataclass(frozen=True)
class WasteRow:
    label: str
    report: Report

    def line(self, against: "WasteRow") -> str:
        report, base = self.report, against.report
        running = report.running_when_full or report.running
        base_running = base.running_when_full or base.running
        return (
            f"| {self.label} | {report.kv_holding:.1%} | {running:.0f} | {running / base_running:.1f} | "
            f"{report.output_tokens_per_s:,.0f} | {report.preemptions} |"
        )


def waste_rows() -> list[WasteRow]:
    """Pre-allocated, paged, and paged with shared prefixes: the mixed trace, all in line from the start, in
    the same bytes of KV cache."""
    trace = [replace(request, arrival_s=0.0) for request in load(MIXED)]
    num_tokens = WASTE_REQUESTS_AT_MOST_LENGTH * WASTE_MAX_MODEL_LEN

    def replayed(block_size: int, *, caching: bool, more_blocks: int = 0) -> Report:
        config = EngineConfig(
            model="none",
            max_model_len=WASTE_MAX_MODEL_LEN,
            max_num_seqs=1024,
            enable_prefix_caching=caching,
            seed=0,
        )
        num_blocks = num_tokens // block_size + more_blocks
        return Replay(config, CARDS["h100"], SHAPES["llama-8b"], num_blocks, block_size).run(trace)

    # One more, since admission leaves a block free for others to grow into, and here nobody grows.
    pre_allocated = replayed(WASTE_MAX_MODEL_LEN, caching=False, more_blocks=1)
    return [
        WasteRow("pre-allocated at maximum length", pre_allocated),
        WasteRow("paged, blocks of 16", replayed(16, caching=False)),
        WasteRow("paged, prefixes shared", replayed(16, caching=True)),
    ]


def waste() -> Result:
    rows = waste_rows()
    lines = [
        "| KV cache | holds tokens | requests at once | times as many | output tokens/s | preemptions |",
        "|---|---|---|---|---|---|",
        *(row.line(rows[0]) for row in rows),
    ]
    return Result("\n".join(lines), all(row.report.kv_holding >= WASTE_GOAL for row in rows[1:]))


CLAIMS: dict[str, Callable[[], Result]] = {"waste": waste}


def put(document: str, name: str, table: str) -> str:
    """The document with a claim's table between its marks. Raises `ValueError` when it has no such marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document needs one line '{begin.strip()}' and one '{end.strip()}'")
    head, rest = document.split(begin)
    return f"{head}{begin}{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="+", choices=list(CLAIMS))
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.name} as well")
    args = parser.parse_args()
    missed = []
    for name in args.claims:
        result = CLAIMS[name]()
        print(result.table)
        if not result.met:
            missed.append(name)
        if args.write:
            DOCUMENT.write_text(put(DOCUMENT.read_text(), name, result.table))
    if missed:
        sys.exit(f"the goal is missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
