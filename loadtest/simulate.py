"""The real scheduler and block manager on a card that is only reckoned: what it would do with a trace.

    python loadtest/simulate.py --card h100 --model llama-8b --trace loadtest/traces/mixed.jsonl --speed 4
    python loadtest/traces.py --requests 1000000 --rate 50 | python loadtest/simulate.py --trace -

Scheduler, block manager, and the worker's rows and inputs are the engine's own; a step takes as long as the
card's roofline says (`roofline.py`), and time passes only by that. So the same trace gives the same report,
but for the host times, which are real: this thread's CPU time in schedule, input, result and update, by how
many sequences ran. A simulated step does not wait for them: the card's overhead is to cover them.

Every request samples one sequence, runs to its full output length, and its tokens are made up. `--speed 4`
lets requests arrive four times as fast. `--engine '{"max_num_seqs": 1024}'` takes what stands in a
`model.json`, or such a file. `--card` and `--model` take a name, or a JSON file with the fields of `Card` and
`ModelShape`; `calibrate.py` writes one of a card.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from host_work import PARTS, HostWork
from octavo.config import EngineConfig, resolve
from octavo.engine.admission import WATERMARK
from octavo.engine.block_manager import BlockManager
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, PromptTooLong
from octavo.protocol import StepPlan
from octavo.request import Request, SamplingParams
from octavo.serving.quiet_collector import QuietCollector
from roofline import Card, ModelShape, named, step_s, swap_s, work_of
from simulation_report import Goal, Report, Tally
from traces import MIXED, TraceError, TraceRequest, read

VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 8192  # where the engine's arguments do not say


class Prompts:
    """Token ids for the lengths in a trace: equal for equal prefixes, random else."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._prefixes: dict[int, list[int]] = {}  # as long as anyone had them

    def make(self, request: TraceRequest) -> tuple[int, ...]:
        head: list[int] = []
        if request.prefix is not None:
            head = self._prefixes.setdefault(request.prefix, [])
            head.extend(self._draw(request.prefix_tokens - len(head)))
            head = head[: request.prefix_tokens]
        return (*head, *self._draw(request.prompt_tokens - len(head)))

    def _draw(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, self._vocab_size, max(count, 0)).tolist()
        return tokens


class Replay:
    """One trace through one scheduler. `block_size` may be longer than a configuration allows: a block as
    long as the longest sequence is a cache in which every request gets its most at once. `on_step` is told of
    every step before it runs."""

    def __init__(
        self,
        config: EngineConfig,
        card: Card,
        shape: ModelShape,
        num_blocks: int,
        block_size: int | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
        *,
        goal: Goal | None = None,
        manager: type[BlockManager] = BlockManager,
        watermark: float = WATERMARK,
        num_host_blocks: int = 0,
    ) -> None:
        """`config` has a `max_model_len`. Raises `ValueError` when one sequence does not fit."""
        size = config.block_size if block_size is None else block_size
        assert config.max_model_len is not None
        config = config.for_model(config.max_model_len)
        if num_blocks * size < config.max_model_len:
            raise ValueError(
                f"the KV cache holds {max(num_blocks, 0)} blocks of {size} tokens, less than one sequence of "
                f"{config.max_model_len} tokens; give it more, or lower max_model_len"
            )
        self.blocks = manager(num_blocks, size, config.enable_prefix_caching, num_host_blocks)
        self._block_bytes = size * shape.kv_bytes_per_token
        self.scheduler = Scheduler(config, self.blocks, watermark=watermark)
        self._on_step = on_step
        self._host = HostWork(VOCAB_SIZE, shape.num_kv_heads, size)
        self._card, self._shape = card, shape
        self._tally = Tally(num_blocks, size, goal or Goal())
        self._prompts = Prompts()
        self._num_requests = 0

    def run(self, trace: Iterable[TraceRequest]) -> Report:
        """To the end of the trace and of its last request. Raises what the trace does.

        Host times are the engine's under a `QuietCollector` only, as it has one.
        """
        duration_s = self._run(iter(trace))
        counters = self.scheduler.counters
        return self._tally.report(
            requests=self._num_requests,
            duration_s=duration_s,
            prompt_tokens=counters.prompt_tokens,
            preemptions=counters.preemptions,
            hit_rate=counters.prefix_hits / max(counters.prefix_queries, 1),
        )

    def _run(self, trace: Iterator[TraceRequest]) -> float:
        """Returns when the last token came."""
        now_s = 0.0
        upcoming = next(trace, None)
        while upcoming is not None or self.scheduler.has_work:
            if upcoming is not None and not self.scheduler.has_work:
                now_s = max(now_s, upcoming.arrival_s)
            while upcoming is not None and upcoming.arrival_s <= now_s:
                self._add(upcoming)
                upcoming = next(trace, None)
            if self.scheduler.has_work:
                now_s = self._step(now_s)
        return now_s

    def _add(self, arrival: TraceRequest) -> None:
        self._num_requests += 1
        request = Request(
            str(self._num_requests),
            self._prompts.make(arrival),
            _params(arrival.output_tokens),
            arrival.priority,
            tenant=arrival.tenant,
            arrived_s=arrival.arrival_s,
        )
        try:
            (sequence,) = self.scheduler.add(request)
        except PromptTooLong:
            self._tally.refuse()
            return
        output_tokens = sequence.max_length - sequence.num_prompt_tokens
        self._tally.arrive(sequence.id, arrival.arrival_s, output_tokens)

    def _step(self, now_s: float) -> float:
        host = self._host
        host.begin()
        with host.timed("schedule"):
            plan = self.scheduler.schedule()
        assert plan is not None, "there is work, but nothing is scheduled"
        if self._on_step:
            self._on_step(plan)
        used_blocks, others_wait = self.blocks.num_used_blocks, self.scheduler.num_waiting > 0
        forward_s = step_s(self._card, work_of(plan, self._shape))
        copies_s = swap_s(self._card, plan, self._block_bytes)
        result = replace(host.execute(plan), forward_s=forward_s, swap_s=copies_s)
        with host.timed("update"):
            outputs = self.scheduler.update(plan, result)
        duration_s = forward_s + copies_s
        now_s += duration_s
        self._tally.step(plan, duration_s, used_blocks, others_wait)
        self._tally.take(now_s, outputs)
        self._tally.host(len(plan.slices), host.spent_s)
        return now_s


@functools.lru_cache(maxsize=4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)


def config_of(text: str) -> EngineConfig:
    """From engine arguments, as an object in JSON or a file that holds one, such as a `model.json`. No model
    is loaded, so none need be named. Raises `ConfigError`, `ValueError`, `OSError`."""
    values = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{text}: engine arguments are a JSON object")
    config = resolve({"model": "none", "seed": 0, **values})
    return config.for_model(config.max_model_len or MAX_MODEL_LEN)


def num_blocks_of(config: EngineConfig, card: Card, shape: ModelShape) -> int:
    """What the configuration says, else what the weights leave of the card's memory. Raises `ValueError` when
    that is not known."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    room_bytes: float
    if config.kv_cache_memory_bytes is not None:
        room_bytes = config.kv_cache_memory_bytes
    elif card.memory_bytes is not None:
        room_bytes = config.gpu_memory_utilization * card.memory_bytes - shape.weight_bytes
    else:
        raise ValueError("the card has no 'memory_bytes'; set kv_cache_memory_bytes in --engine")
    return max(int(room_bytes / (shape.kv_bytes_per_token * config.block_size)), 0)


def num_host_blocks_of(config: EngineConfig, card: Card, shape: ModelShape) -> int:
    """What `swap_space` asks for; 4 GiB where it is not set and the card's link is known. Raises `ValueError`
    when that is not known, but asked for."""
    if not config.enable_prefix_caching or config.preemption_mode == "recompute":
        return 0
    if card.link_bytes_per_s is None and config.swap_space:
        raise ValueError("the card has no 'link_bytes_per_s'; leave swap_space out of --engine")
    default_gib = 0 if card.link_bytes_per_s is None else 4
    wanted_gib = default_gib if config.swap_space is None else config.swap_space
    return int(wanted_gib * 2**30 / (shape.kv_bytes_per_token * config.block_size))


def text_of(report: Report) -> str:
    """For people."""

    def quantiles(values_s: dict[str, float]) -> str:
        return ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in values_s.items())

    full = report.running_when_full
    lines = [
        f"{report.requests} requests ({report.refused} refused), {report.steps} steps, "
        f"{report.duration_s:,.1f} s",
        f"throughput     {report.output_tokens_per_s:,.0f} output and "
        f"{report.prompt_tokens_per_s:,.0f} prompt tokens/s",
        f"goodput        {report.goodput_per_s:,.2f} requests/s within the goal",
        f"first token    {quantiles(report.ttft_s)}",
        f"inter-token    {quantiles(report.itl_s)}",
        f"running        {report.running:,.0f} in the mean, at most {report.running_most}"
        + ("" if full is None else f"; {full:,.0f} while others waited"),
        f"preemptions    {report.preemptions}",
        f"prefix hits    {report.prefix_hit_rate:.1%} of the tokens admitted",
        f"KV cache       {report.kv_allocated:.1%} allocated in the mean, at most "
        f"{report.kv_allocated_most:.1%}; of that, {report.kv_holding:.2%} holds tokens",
        "",
        "host time of a step on this machine, ms",
        "  sequences        steps   median      p99   us/seq" + "".join(f"{part:>10}" for part in PARTS),
    ]
    for band in report.host:
        each_us = 1e3 * band.median_ms / band.mean_sequences
        lines.append(
            f"  {band.least_sequences:5} to {band.most_sequences:5}{band.steps:9}{band.median_ms:9.3f}"
            f"{band.p99_ms:9.3f}{each_us:9.2f}" + "".join(f"{band.parts_ms[part]:10.3f}" for part in PARTS)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default=str(MIXED), help="a file; - is the standard input")
    parser.add_argument("--limit", type=int, help="requests; by default all of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="arrive so many times as fast")
    parser.add_argument("--card", default="h100", help="a name or a JSON file")
    parser.add_argument("--model", default="llama-8b", help="a name or a JSON file")
    parser.add_argument("--engine", default="{}", help="engine arguments in JSON, or a model.json")
    parser.add_argument(
        "--goal",
        nargs=2,
        type=float,
        default=(1e3 * Goal.ttft_s, 1e3 * Goal.itl_s),
        metavar=("TTFT_MS", "ITL_MS"),
        help="requests count as goodput that get their first token, and in the mean each other one, so soon",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args()
    try:
        card, shape = named(Card, args.card), named(ModelShape, args.model)
        config = config_of(args.engine)
        goal = Goal(*(value_ms / 1e3 for value_ms in args.goal))
        num_blocks, num_host_blocks = (of(config, card, shape) for of in (num_blocks_of, num_host_blocks_of))
        replay = Replay(config, card, shape, num_blocks, goal=goal, num_host_blocks=num_host_blocks)
    except (ConfigError, ValueError, OSError) as error:
        parser.error(str(error))
    try:
        with sys.stdin if args.trace == "-" else Path(args.trace).open() as lines:
            trace = itertools.islice(read(lines), args.limit)
            sped_up = (replace(request, arrival_s=request.arrival_s / args.speed) for request in trace)
            with QuietCollector():
                report = replay.run(sped_up)
    except (TraceError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(asdict(report)) if args.json else text_of(report))


if __name__ == "__main__":
    main()
