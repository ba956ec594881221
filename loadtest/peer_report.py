"""From what was measured to what is reported: medians, ratios, goals met or not, one table."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peer_table import (
    GOALS,
    MOST_STEPS_BETWEEN_TOKENS,
    MOST_TOKENS_PER_RESPONSE,
    START_GOALS,
    Goal,
    Work,
)

STREAMS = "octavo-streams"
MOST_OTHERS_CORES = 0.1
_STREAM_FIGURES = (
    "tokens_per_response",
    "inter_token_p50_s",
    "inter_token_p99_s",
    "steady_p99_s",
    "client_cpu_s",
)


@dataclass
class Results:
    """What a run measured, by peer and work. Only counted turns are in it."""

    works: Mapping[str, Work]
    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    load_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    starts_s: dict[str, list[float]] = field(default_factory=dict)  # of `octavo serve`: warm and cold
    others_cores: list[float] = field(default_factory=list)  # cores that other programs used, at each rest
    read_bytes_per_s: list[float] = field(default_factory=list)
    step_bytes: dict[str, int] = field(default_factory=dict)

    def median(self, peer: str, work: str, figure: str = "seconds") -> float | None:
        if peer in self.failures or not (answers := self.answers.get(peer, {}).get(work)):
            return None
        return float(statistics.median(answer[figure] for answer in answers))

    def rate(self, peer: str, work: str) -> float | None:
        """Output tokens a second, the prompts' time included."""
        seconds = self.median(peer, work)
        return self.works[work].total_output_tokens / seconds if seconds else None

    def step_s(self, peer: str) -> float | None:
        """A decode step of the work `batch`: what is left of it without the prompts."""
        whole, prefill = self.median(peer, "batch"), self.median(peer, "prefill")
        steps = self.works["batch"].output_tokens - 1 if whole else 0
        return (whole - prefill) / steps if whole and prefill and steps else None


@dataclass(frozen=True)
class Row:
    """A figure beside its bound, if it has one."""

    label: str
    value: float
    bound: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        verdict = {None: "", True: "met", False: "NOT MET"}[self.met]
        goal = "" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:.2f}"
        return f"  {self.label:56} {goal:>8} {self.value:8.2f}  {verdict}".rstrip()


def rows(results: Results, goals: Sequence[Goal] = GOALS) -> list[Row]:
    """Those for which both sides were measured."""
    return [*_ratios(results, goals), *_streams(results), *_starts(results), *_limits(results)]


def _ratios(results: Results, goals: Sequence[Goal]) -> Iterator[Row]:
    for goal in goals:
        if goal.work not in results.works:
            continue
        ours, theirs = results.rate(goal.ours, goal.work), results.rate(goal.theirs, goal.work)
        if ours and theirs:
            work = results.works[goal.work]
            yield Row(f"{work}: {goal.ours} / {goal.theirs}", ours / theirs, goal.at_least or None)


def _streams(results: Results) -> Iterator[Row]:
    merged = results.median(STREAMS, "batch", "tokens_per_response")
    if merged is not None:
        yield Row(f"{STREAMS}: tokens per response", merged, MOST_TOKENS_PER_RESPONSE, at_most=True)
    p99_s, step_s = results.median(STREAMS, "batch", "steady_p99_s"), results.step_s("octavo")
    if p99_s is not None and step_s:
        label = f"{STREAMS}: inter-token p99 in steps, prompts done"
        yield Row(label, p99_s / step_s, MOST_STEPS_BETWEEN_TOKENS, at_most=True)


def _starts(results: Results) -> Iterator[Row]:
    load_s = results.load_s.get("vllm")
    for kind, taken_s in results.starts_s.items():
        if load_s:
            ratio = load_s / statistics.median(taken_s)
            yield Row(f"load of vllm / start of octavo serve, {kind}", ratio, START_GOALS[kind])


def _limits(results: Results) -> Iterator[Row]:
    if not results.read_bytes_per_s:
        return
    speed = statistics.median(results.read_bytes_per_s)
    for peer, num_bytes in results.step_bytes.items():
        if step_s := results.step_s(peer):
            yield Row(f"{peer}: share of the read bandwidth in a decode step", num_bytes / speed / step_s)


def table(results: Results, machine: Mapping[str, Any], turns: int) -> str:
    """All that a reader of the terminal wants."""
    lines = [
        f"SmolLM2-135M on {machine['cores']} cores of {machine['cpu']}, {machine['date']}",
        f"output tokens/s, prompts' time included: medians of {turns} turns (least to most)",
        "",
    ]
    shown = [work for work in results.works.values() if work.output_tokens > 1]
    lines.append(f"  {'':16}" + "".join(f"{work!s:>26}" for work in shown) + f"{'load s':>9}")
    for peer in results.answers:
        if peer not in results.failures:
            cells = "".join(f"{_cell(results, peer, work):>26}" for work in shown)
            lines.append(f"  {peer:16}{cells}{results.load_s[peer]:9.1f}")
    lines += [f"  {peer:16}failed: {reason}" for peer, reason in results.failures.items()]
    for kind, taken_s in results.starts_s.items():
        lines.append(f"  start of octavo serve, {kind}: {statistics.median(taken_s):.2f} s")
    if results.others_cores and (others := statistics.median(results.others_cores)) > MOST_OTHERS_CORES:
        lines.append(
            f"  WARNING: other programs used {others:.1f} cores all the while: repeat this when they rest"
        )
    if speed := results.read_bytes_per_s:
        lines.append(f"  read bandwidth: {statistics.median(speed) / 1e9:.1f} GB/s")
    for peer in results.step_bytes:
        if step_s := results.step_s(peer):
            lines.append(f"  decode step of {peer}: {step_s * 1e3:.2f} ms, prefill excluded")
    for figure in _STREAM_FIGURES:
        if (value := results.median(STREAMS, "batch", figure)) is not None:
            lines.append(f"  {STREAMS}: {figure} {value:.4g}")
    return "\n".join([*lines, "", *map(str, rows(results))])


def _cell(results: Results, peer: str, work: Work) -> str:
    rate = results.rate(peer, work.name)
    if rate is None:
        return ""
    rates = [work.total_output_tokens / answer["seconds"] for answer in results.answers[peer][work.name]]
    return f"{rate:.1f} ({min(rates):.0f} to {max(rates):.0f})"
