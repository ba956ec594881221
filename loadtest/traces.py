"""Traces: who asks for how many tokens when. Read, written and made up here; `simulate.py` replays them.

    python loadtest/traces.py --requests 1000000 --rate 200 --seed 7 > trace.jsonl

A trace is JSON lines, one request each, in order of arrival:

    {"arrival_s": 0.25, "prompt_tokens": 300, "output_tokens": 120, "prefix": 3, "prefix_tokens": 200,
     "tenant": "a", "priority": 0}

The last four may be left out. Prompts with the same `prefix` begin with the same tokens, `prefix_tokens` of
them, as prompts with one system prompt do; all else in them is their own.

A made-up trace has Poisson arrivals and log-normal lengths of prompts and outputs. Of the prompts, `--shared`
begin with one of `--prefixes` system prompts, the first of which is the most common (Zipf's law).
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MIXED = Path(__file__).parent / "traces" / "mixed.jsonl"


class TraceError(Exception):
    """A line that is no request; the text says which line, what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Lengths in tokens. Raises `ValueError`."""

    arrival_s: float  # after the trace begins
    prompt_tokens: int  # the shared prefix included
    output_tokens: int
    prefix: int | None = None  # which one
    prefix_tokens: int = 0
    tenant: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"'{name}' is {getattr(self, name)!r}; allowed: {allowed}")

        def is_int(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        is_time = isinstance(self.arrival_s, float) or is_int(self.arrival_s)
        require(is_time and 0 <= self.arrival_s < float("inf"), "arrival_s", "seconds, 0 and more")
        require(is_int(self.prompt_tokens) and self.prompt_tokens > 0, "prompt_tokens", "1 and more")
        require(is_int(self.output_tokens) and self.output_tokens > 0, "output_tokens", "1 and more")
        require(
            self.prefix is None or (is_int(self.prefix) and self.prefix >= 0),
            "prefix",
            "null, or a number that names it, 0 and more",
        )
        most = 0 if self.prefix is None else self.prompt_tokens
        require(
            is_int(self.prefix_tokens) and 0 <= self.prefix_tokens <= most,
            "prefix_tokens",
            f"0 to {most}: prompt_tokens where 'prefix' names one",
        )
        require(self.tenant is None or isinstance(self.tenant, str), "tenant", "null or a string")
        require(is_int(self.priority), "priority", "an integer")


_NAMES = {field.name for field in fields(TraceRequest)}
_DEFAULTS = {field.name: field.default for field in fields(TraceRequest)}


def read(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """One request a line, as they are asked for. Raises `TraceError`."""
    before_s = 0.0
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
            if unknown := sorted(values.keys() - _NAMES):
                raise ValueError(f"it has '{unknown[0]}'; allowed: {', '.join(sorted(_NAMES))}")
            request = TraceRequest(**values)
            if request.arrival_s < before_s:
                raise ValueError(
                    f"it arrives at {request.arrival_s} s, before the line above; sort the lines"
                )
        except (ValueError, TypeError) as error:
            raise TraceError(f"line {number} of the trace: {error}") from error
        before_s = request.arrival_s
        yield request


def load(path: Path) -> list[TraceRequest]:
    """All of a trace. Raises `TraceError`, `OSError`."""
    with path.open() as lines:
        return list(read(lines))


def line_of(request: TraceRequest) -> str:
    """As it stands in a file, without what is at its default."""
    given = {name: value for name, value in asdict(request).items() if value != _DEFAULTS[name]}
    return json.dumps(given, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal: half are shorter than `median`, two thirds within a factor of e^`sigma` of it."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(max(1, round(self.median * rng.lognormvariate(0, self.sigma))), self.most)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a made-up trace is like."""

    rate_per_s: float = 20.0
    prompts: Lengths = Lengths(200, 0.8, 1500)  # without the shared prefix
    outputs: Lengths = Lengths(150, 0.7, 500)
    shared: float = 0.5  # of the prompts
    prefixes: int = 8
    prefix_lengths: Lengths = Lengths(120, 0.5, 500)
    tenants: int = 0  # the first sends the most; 0: nobody says who they are


def generate(traffic: Traffic, seed: int) -> Iterator[TraceRequest]:
    """Requests without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    prefix_tokens = [traffic.prefix_lengths.draw(rng) for _ in range(traffic.prefixes)]
    prefix_weights = [1 / rank for rank in range(1, traffic.prefixes + 1)]
    tenant_weights = [1 / rank for rank in range(1, traffic.tenants + 1)]
    now_s = 0.0
    while True:
        now_s += rng.expovariate(traffic.rate_per_s)
        prompt, output = traffic.prompts.draw(rng), traffic.outputs.draw(rng)
        prefix, shared = None, 0
        if prefix_tokens and rng.random() < traffic.shared:
            prefix = rng.choices(range(traffic.prefixes), prefix_weights)[0]
            shared = prefix_tokens[prefix]
        tenant = None
        if tenant_weights:
            tenant = f"tenant-{rng.choices(range(traffic.tenants), tenant_weights)[0]}"
        yield TraceRequest(round(now_s, 4), prompt + shared, output, prefix, shared, tenant)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Traffic()
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=usual.rate_per_s, help="requests a second")
    for name, lengths in (("prompt", usual.prompts), ("output", usual.outputs)):
        parser.add_argument(f"--{name}-median", type=float, default=lengths.median, help="tokens")
        parser.add_argument(f"--{name}-sigma", type=float, default=lengths.sigma)
        parser.add_argument(f"--{name}-most", type=int, default=lengths.most, help="tokens")
    parser.add_argument("--shared", type=float, default=usual.shared, help="share with a system prompt")
    parser.add_argument("--prefixes", type=int, default=usual.prefixes, help="different system prompts")
    parser.add_argument("--tenants", type=int, default=usual.tenants)
    args = parser.parse_args()
    traffic = Traffic(
        rate_per_s=args.rate,
        prompts=Lengths(args.prompt_median, args.prompt_sigma, args.prompt_most),
        outputs=Lengths(args.output_median, args.output_sigma, args.output_most),
        shared=args.shared,
        prefixes=args.prefixes,
        tenants=args.tenants,
    )
    for request in itertools.islice(generate(traffic, args.seed), args.requests):
        sys.stdout.write(line_of(request) + "\n")


if __name__ == "__main__":
    main()
