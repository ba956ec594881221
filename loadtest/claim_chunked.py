"""The claim `chunked`: while a long prompt is computed in chunks, those that decode go on.

Short requests decode, and long prompts arrive meanwhile. Chunked prefill off, and on with several budgets of
tokens a step, or with a target for the time that a step takes. Simulated for a large model on a GPU, and, as
the claim `chunked-cpu`, on the real engine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from claim import Bar, Claim, Panel, Result, markdown
from claim_engine import Client, Run, running, smollm2, tokens
from octavo.config import EngineConfig
from roofline import CARDS, SHAPES
from simulate import Replay
from traces import TraceRequest

GOAL = 4  # times: how much lower the 99th percentile of the time between two tokens is
LEAST_THROUGHPUT = 0.95  # of what it is without chunks
MAX_MODEL_LEN = 8192
TURNS = 3  # of the real engine

_HEADER = ("chunked prefill", "inter-token p50, ms", "p99, ms", "times lower", "throughput, of off")
_OFF = {"off": {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN}}


@dataclass(frozen=True)
class Load:
    """Lengths in tokens. A long prompt comes when each short request has one of `arrivals` tokens."""

    num_short: int
    short_prompt: int
    short_output: int
    long_prompt: int
    long_output: int
    arrivals: tuple[int, ...]


REAL = Load(8, 64, 110, 2000, 4, (20, 65))
# A GPU decodes so fast that time tells better when a long prompt comes.
SIMULATED = Load(16, 64, 500, 8000, 8, ())
SIMULATED_ARRIVALS_S = [0.5 * number for number in range(1, 7)]


@dataclass(frozen=True)
class Seen:
    """One run."""

    gaps_s: list[float]  # between two tokens of a short request
    step_tokens: list[int]  # that each step computed
    total_s: float
    answers: list[list[int]]  # of the short ones, then of the long ones


def drive(run: Run, load: Load) -> Seen:
    """The same prompts each time, and the long ones after the same tokens of the short ones."""
    rng, engine = np.random.default_rng(0), run.engine
    engine.steps.take()
    begin_s = time.perf_counter()
    short = [run.add(tokens(rng, load.short_prompt), load.short_output) for _ in range(load.num_short)]
    long: list[Client] = []
    step_tokens: list[int] = []
    while engine.has_work:
        if len(long) < len(load.arrivals) and len(short[0].token_ids) >= load.arrivals[len(long)]:
            long.append(run.add(tokens(rng, load.long_prompt), load.long_output))
        engine.step()
        step_tokens += [step.num_tokens for step in engine.steps.take()]
    return Seen(
        gaps_s=[gap for client in short for gap in client.gaps_s],
        step_tokens=step_tokens,
        total_s=time.perf_counter() - begin_s,
        answers=[client.token_ids for client in short + long],
    )


@dataclass(frozen=True)
class Row:
    """The work is the same in all rows, so that the total time tells the throughput."""

    label: str
    p50_s: float
    p99_s: float
    total_s: float

    def lower(self, off: "Row") -> float:
        return off.p99_s / self.p99_s

    def throughput(self, off: "Row") -> float:
        return off.total_s / self.total_s

    def meets(self, off: "Row") -> bool:
        return self.lower(off) >= GOAL and self.throughput(off) >= LEAST_THROUGHPUT

    def cells(self, off: "Row") -> tuple[str, ...]:
        compared = (f"{self.lower(off):.1f}", f"{self.throughput(off):.2f}") if self is not off else ("", "")
        return (self.label, f"{1e3 * self.p50_s:,.1f}", f"{1e3 * self.p99_s:,.1f}", *compared)


def budgets(*sizes: int) -> Mapping[str, dict[str, Any]]:
    """Engine arguments by label, those without chunks first."""
    return {**_OFF, **{f"{size:,} tokens a step": {"max_num_batched_tokens": size} for size in sizes}}


def targets(*targets_ms: int) -> Mapping[str, dict[str, Any]]:
    return {f"`target_itl_ms` {target}": {"target_itl_ms": float(target)} for target in targets_ms}


def real_rows() -> list[Row]:
    """Medians over turns, so that a change of the machine's speed hits all rows."""
    arguments = {**budgets(512, 256, 128), **targets(75, 150)}
    common = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "enable_prefix_caching": False}
    engines = [smollm2(kv_cache_memory_bytes=2**29, **common, **chosen) for chosen in arguments.values()]
    with running(engines) as runs:
        turns = [[drive(run, REAL) for run in runs] for _ in range(TURNS)]
    rows = []
    for label, seen in zip(arguments, zip(*turns, strict=True), strict=True):
        p50_s, p99_s = np.median([np.quantile(one.gaps_s, (0.5, 0.99)) for one in seen], axis=0)
        rows.append(Row(label, p50_s, p99_s, median(one.total_s for one in seen)))
    return rows


def simulated_row(label: str, arguments: dict[str, Any]) -> Row:
    config = EngineConfig(
        model="none",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=128,
        enable_prefix_caching=False,
        seed=0,
        **arguments,
    )
    load = SIMULATED
    trace = [TraceRequest(0.0, load.short_prompt, load.short_output)] * load.num_short
    trace += [TraceRequest(at_s, load.long_prompt, load.long_output) for at_s in SIMULATED_ARRIVALS_S]
    num_blocks = len(trace) * MAX_MODEL_LEN // config.block_size
    report = Replay(config, CARDS["h100"], SHAPES["llama-8b"], num_blocks).run(trace)
    return Row(label, report.itl_s["p50"], report.itl_s["p99"], report.duration_s)


def result(rows: list[Row], title: str) -> Result:
    off, *chunked = rows
    bars = [Bar(row.label.replace("`", ""), row.p99_s, row.cells(off)[2], row is off) for row in rows]
    met = any(row.meets(off) for row in chunked)
    return Result(markdown(_HEADER, [row.cells(off) for row in rows]), met, (Panel(title, tuple(bars)),))


def measure_simulated() -> Result:
    arguments = {**budgets(2048, 1024, 512, 256), **targets(15, 30)}
    rows = [simulated_row(label, chosen) for label, chosen in arguments.items()]
    return result(rows, "inter-token p99, ms, prompts of 8,000 tokens on a simulated H100")


def measure_real() -> Result:
    return result(real_rows(), "inter-token p99, ms, prompts of 2,000 tokens")


CHUNKED = Claim(measure_simulated, exact=True)
CHUNKED_CPU = Claim(measure_real, exact=False)
