"""What the defaults are chosen by: each beside others, the rest as it is, on simulated machines.

    python loadtest/choose_defaults.py                      print the table
    python loadtest/choose_defaults.py --write              and put it into backend/docs/scheduling.md
    python loadtest/choose_defaults.py --only watermark --limit 300

Each machine replays the mixed trace at three rates of arrival: below what it can do, about that, and above.
The figures are means over the three: requests a second that reach the machine's goal, and 99th percentiles of
the time to the first token and between tokens.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from claim import markdown
from claims import put
from octavo.config import EngineConfig
from octavo.engine.admission import WATERMARK
from octavo.engine.block_manager import BlockManager
from octavo.engine.sequence import Sequence
from octavo.serving.quiet_collector import QuietCollector
from roofline import CARDS, SHAPES
from simulate import Replay, num_blocks_of
from simulation_report import Goal
from traces import MIXED, TraceRequest, load

DOCUMENT = Path(__file__).parents[1] / "backend" / "docs" / "scheduling.md"
MAX_MODEL_LEN = 2048  # the trace's longest request has 1,968


@dataclass(frozen=True)
class Machine:
    card: str
    shape: str
    speeds: tuple[float, ...]  # times the trace's 20 requests a second
    goal: Goal
    arguments: dict[str, Any] = field(default_factory=dict)


MACHINES = {
    "H100, 8B": Machine("h100", "llama-8b", (2.0, 2.5, 3.0), Goal(1.0, 0.05)),
    "L4, 8B": Machine("l4", "llama-8b", (0.2, 0.25, 0.3), Goal(5.0, 0.2)),
    "2 cores, 135M": Machine(
        "zen4-2-cores", "smollm2-135m", (0.1, 0.125, 0.15), Goal(5.0, 0.2), {"kv_cache_memory_bytes": 2**32}
    ),
}


class HeadsFirst(BlockManager):
    """Evicts what was used least recently, of one sequence the beginning before the end."""

    def free(self, seq: Sequence) -> None:
        table = seq.block_table.copy()
        super().free(seq)
        for block_id in table:
            if block_id in self._free and self._hashes[block_id] is not None:
                self._free.move_to_end(block_id)


class NewestFirst(BlockManager):
    """Evicts what was used most recently."""

    def free(self, seq: Sequence) -> None:
        table = seq.block_table.copy()
        super().free(seq)
        for block_id in table:
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)


@dataclass(frozen=True)
class Choice:
    """One value of one setting, the others at their defaults."""

    setting: str
    value: str
    arguments: dict[str, Any] = field(default_factory=dict)
    watermark: float = WATERMARK
    manager: type[BlockManager] = BlockManager


def choices() -> Iterator[Choice]:
    for name, values in {
        "max_num_seqs": (32, 64, 128, 256, 512),
        "max_num_batched_tokens": (512, 1024, 2048, 4096),
    }.items():
        for value in values:
            yield Choice(name, f"{value:,}", {name: value})
    for share in (0.0, 0.01, 0.02, 0.05, 0.1):
        yield Choice("watermark", f"{share:.0%}", watermark=share)
    for label, manager in {
        "least recently used, ends first": BlockManager,
        "least recently used, beginnings first": HeadsFirst,
        "most recently used": NewestFirst,
    }.items():
        yield Choice("evicted first", label, manager=manager)


@dataclass(frozen=True)
class Outcome:
    """Means over the rates of arrival."""

    goodput_per_s: float
    ttft_p99_s: float
    itl_p99_s: float

    def cell(self) -> str:
        return f"{self.goodput_per_s:.2f}, {self.ttft_p99_s:.2f} s, {1e3 * self.itl_p99_s:.0f} ms"


def outcome(machine: Machine, choice: Choice, trace: list[TraceRequest]) -> Outcome:
    config = EngineConfig(
        model="none", max_model_len=MAX_MODEL_LEN, seed=0, **{**machine.arguments, **choice.arguments}
    )
    card, shape = CARDS[machine.card], SHAPES[machine.shape]
    reports = [
        Replay(
            config,
            card,
            shape,
            num_blocks_of(config, card, shape),
            goal=machine.goal,
            manager=choice.manager,
            watermark=choice.watermark,
        ).run(replace(request, arrival_s=request.arrival_s / speed) for request in trace)
        for speed in machine.speeds
    ]
    return Outcome(
        fmean(report.goodput_per_s for report in reports),
        fmean(report.ttft_s["p99"] for report in reports),
        fmean(report.itl_s["p99"] for report in reports),
    )


def is_default(choice: Choice) -> bool:
    defaults = EngineConfig(model="none").for_model(MAX_MODEL_LEN)
    return (
        all(getattr(defaults, name) == value for name, value in choice.arguments.items())
        and choice.watermark == WATERMARK
        and choice.manager is BlockManager
    )


def table(only: str | None, limit: int | None) -> str:
    """Each setting's values in rows, the machines in columns."""
    trace = load(MIXED)[:limit]
    rows: list[tuple[str, ...]] = []
    at_default: tuple[str, ...] | None = None  # the same for every setting
    for choice in choices():
        if only not in (None, choice.setting):
            continue
        default = is_default(choice)
        if default and at_default is not None:
            cells = at_default
        else:
            cells = tuple(outcome(machine, choice, trace).cell() for machine in MACHINES.values())
            at_default = cells if default else at_default
        value = f"**{choice.value}**" if default else choice.value
        rows.append((choice.setting, value, *cells))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return markdown(("setting", "value", *MACHINES), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    settings = list(dict.fromkeys(choice.setting for choice in choices()))
    parser.add_argument("--only", choices=settings, help="one setting")
    parser.add_argument("--limit", type=int, help="requests; by default all of the trace")
    parser.add_argument("--write", action="store_true", help=f"the table into {DOCUMENT.name} as well")
    args = parser.parse_args()
    if args.write and (args.only or args.limit):
        parser.error("--write takes the whole table; leave --only and --limit out")
    with QuietCollector():
        found = table(args.only, args.limit)
    print(found)
    if args.write:
        DOCUMENT.write_text(put(DOCUMENT.read_text(), "defaults", found))


if __name__ == "__main__":
    main()
