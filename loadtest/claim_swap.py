"""The claims `swap` and `swap-engine`: blocks that a full cache evicts come back from host memory where that
is faster than computing them, and only there.

Two loads of one and a half times the cache: answers that outgrow it, so that sequences are preempted, and
chats that return when their history has been evicted. Each with `preemption_mode` recompute, swap and auto,
and host memory that holds all of it. Simulated on two links; and on a real engine.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from claim import Bar, Claim, Panel, Result, markdown
from claim_engine import Make, Run, running, smollm2, tokens
from octavo.config import EngineConfig, PreemptionMode
from roofline import CARDS, SHAPES
from simulate import Replay
from traces import TraceRequest

GOAL = 0.9  # of the throughput of the better one that automatic reaches
CROWDED = 1.5  # times the cache
BLOCK_SIZE = 16
MODES: dict[PreemptionMode, str] = {"recompute": "never swap", "swap": "always", "auto": "automatic"}
LINKS_GB_PER_S = (0.8 * 64, 1.0)  # PCI Express 5 x16, and one on which computing is faster

_HEADER = (
    "load",
    "link",
    *(f"{label}, tokens/s" for label in MODES.values()),
    "automatic / the better one",
    "preemptions",
    "GB out and in: always",
    "GB out and in: automatic",
)


@dataclass(frozen=True)
class Load:
    """Tokens of each request. `turns` times the same `count` histories come, each time with a question."""

    label: str
    count: int
    seats: int  # max_num_seqs
    history: int
    question: int
    output: int
    turns: int = 1

    @property
    def num_blocks(self) -> int:
        """Of a cache so small. Those that wait for their first step are no load yet."""
        at_once = self.seats if self.turns == 1 else self.count
        return int(at_once * (self.history + self.question + self.output) / BLOCK_SIZE / CROWDED)

    @property
    def max_model_len(self) -> int:
        return 2 * (self.history + self.question + self.output)

    @property
    def num_tokens(self) -> int:
        return self.turns * self.count * (self.history + self.question + self.output)

    def trace(self) -> Iterator[TraceRequest]:
        """All in line from the start."""
        rng = np.random.default_rng(0)
        for _ in range(self.turns):
            for number in range(self.count):
                # Not all of one length, or else they would all end at once.
                output = int(rng.integers(self.output // 2, 3 * self.output // 2))
                yield TraceRequest(0.0, self.history + self.question, output, number, self.history)


SIMULATED = (
    Load("answers that outgrow the cache", 48, 24, 200, 56, 1000),
    Load("chats that return", 18, 8, 3000, 60, 20, turns=4),
)
REAL = (
    Load("answers that outgrow the cache", 16, 12, 24, 8, 160),
    Load("chats that return", 6, 2, 480, 24, 8, turns=3),
)


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float  # of prompts and answers
    preemptions: int
    out_bytes: float
    in_bytes: float

    @property
    def copied(self) -> str:
        return f"{self.out_bytes / 1e9:.2f} and {self.in_bytes / 1e9:.2f}"


@dataclass(frozen=True)
class Row:
    load: str
    link: str
    by_mode: dict[PreemptionMode, Outcome]

    @property
    def share(self) -> float:
        """Of the throughput of the better one, automatic's."""
        auto, *others = (self.by_mode[mode].tokens_per_s for mode in ("auto", "recompute", "swap"))
        return auto / max(others)

    def cells(self) -> tuple[str, ...]:
        swap, auto = self.by_mode["swap"], self.by_mode["auto"]
        return (
            self.load,
            self.link,
            *(f"{self.by_mode[mode].tokens_per_s:,.0f}" for mode in MODES),
            f"{self.share:.2f}",
            f"{self.by_mode['recompute'].preemptions}",
            swap.copied,
            auto.copied,
        )

    def panel(self) -> Panel:
        rates = {label: self.by_mode[mode].tokens_per_s for mode, label in MODES.items()}
        bars = (Bar(label, rate, f"{rate:,.0f}", label != MODES["auto"]) for label, rate in rates.items())
        return Panel(f"tokens/s: {self.load}, {self.link}", tuple(bars))


def simulated(load: Load, link_gb_per_s: float) -> Row:
    card = replace(CARDS["h100"], link_bytes_per_s=1e9 * link_gb_per_s)

    def outcome(mode: PreemptionMode) -> Outcome:
        config = EngineConfig(
            model="none",
            max_model_len=load.max_model_len,
            max_num_seqs=load.seats,
            preemption_mode=mode,
            seed=0,
        )
        num_host_blocks = 4 * load.num_tokens // BLOCK_SIZE
        replay = Replay(config, card, SHAPES["llama-8b"], load.num_blocks, num_host_blocks=num_host_blocks)
        report, host = replay.run(load.trace()), replay.blocks.host
        rate = report.output_tokens_per_s + report.prompt_tokens_per_s
        block_bytes = BLOCK_SIZE * SHAPES["llama-8b"].kv_bytes_per_token
        out_bytes, in_bytes = (count * block_bytes for count in (host.num_swapped_out, host.num_swapped_in))
        return Outcome(rate, report.preemptions, out_bytes, in_bytes)

    return Row(load.label, f"{link_gb_per_s:g} GB/s", {mode: outcome(mode) for mode in MODES})


def serve(run: Run, load: Load, rng: np.random.Generator) -> float:
    """Histories of its own, turn by turn. Returns tokens a second."""
    histories = [tokens(rng, load.history) for _ in range(load.count)]
    num_tokens = 0
    begin_s = time.perf_counter()
    for _ in range(load.turns):
        for history in histories:
            output = int(rng.integers(load.output // 2, 3 * load.output // 2))
            run.add(history + tokens(rng, load.question), output)
            num_tokens += load.history + load.question + output
        run.drain()
    return num_tokens / (time.perf_counter() - begin_s)


def real(make: Make, load: Load, repeat: int) -> Row:
    """Medians of some repetitions, in turns with each other, after one that is not counted; preemptions and
    bytes are means of all."""
    common = {
        "block_size": BLOCK_SIZE,
        "max_model_len": load.max_model_len,
        "max_num_seqs": load.seats,
        "num_gpu_blocks_override": load.num_blocks,
        "swap_space": 1.0,
    }
    with running(make(preemption_mode=mode, **common) for mode in MODES) as runs:
        rates: dict[PreemptionMode, list[float]] = {mode: [] for mode in MODES}
        for number in range(repeat + 1):
            for mode, run in zip(MODES, runs, strict=True):
                rates[mode].append(serve(run, load, np.random.default_rng(number)))
        by_mode = {}
        for mode, run in zip(MODES, runs, strict=True):
            stats = run.engine.stats()
            by_mode[mode] = Outcome(
                median(rates[mode][1:]),
                stats.preemptions_total // (repeat + 1),
                stats.swapped_out_bytes_total / (repeat + 1),
                stats.swapped_in_bytes_total / (repeat + 1),
            )
    return Row(load.label, "this machine's memory", by_mode)


def result_of(rows: Sequence[Row]) -> Result:
    met = all(row.share >= GOAL for row in rows)
    return Result(markdown(_HEADER, (row.cells() for row in rows)), met, tuple(row.panel() for row in rows))


SWAP = Claim(
    lambda: result_of([simulated(load, link) for link in LINKS_GB_PER_S for load in SIMULATED]), exact=True
)
SWAP_ENGINE = Claim(lambda: result_of([real(smollm2, load, repeat=3) for load in REAL]), exact=False)
