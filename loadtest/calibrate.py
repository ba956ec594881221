"""How well the simulator knows this machine: fitted to one workload of the real engine, it predicts others.

    python loadtest/calibrate.py --card machine.json

The engine runs four workloads, greedily, every request in line from the start. The steps of the first, whose
sequences come and go so that steps of every size occur, give the four numbers of the roofline; with these
the simulator replays the other three, and its output tokens a second stand beside the engine's. Each step of
the engine has to compute as many tokens of as many sequences as the simulator's: else they do not run the
same scheduler, and the command fails. `--card FILE` keeps the four numbers, for `simulate.py --card FILE`.

For a quiet machine: what else runs there slows one side of the comparison only.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo import Engine, SamplingParams
from octavo.protocol import StepPlan
from octavo.request import TextDelta
from octavo.worker.executor import resolve_device, resolve_dtype
from octavo_kernels import ops
from offline import SMOLLM2
from roofline import Card, ModelShape, StepWork, fit, work_of
from simulate import Prompts, Replay
from traces import TraceRequest

MOST_OFF = 0.15  # as a share of the measured throughput, either way
MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 1024


def _requests(*lengths: tuple[int, int]) -> tuple[TraceRequest, ...]:
    return tuple(TraceRequest(0, prompt, output) for prompt, output in lengths)


# Prompts and outputs of all lengths, a few more of them than there are seats.
FITTED = _requests(*((20 + 15 * (7 * i % 40), 8 + 6 * (11 * i % 40)) for i in range(40)))
# Decoding in a large batch, long prompts, and one sequence alone.
PREDICTED: Mapping[str, tuple[TraceRequest, ...]] = {
    "32 x (128, 128)": _requests(*[(128, 128)] * 32),
    "8 x (512, 64)": _requests(*[(512, 64)] * 8),
    "1 x (128, 128)": _requests((128, 128)),
}


class StepsDiffer(Exception):
    """The engine and the simulator did not compute the same steps."""


@dataclass(frozen=True)
class Measured:
    """One workload on the real engine, or the medians of several turns of it."""

    step_s: list[float]  # with the host's work
    sizes: list[tuple[int, int]]  # of each step: tokens computed, of how many sequences
    total_s: float
    output_tokens: int

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.total_s


@dataclass(frozen=True)
class Prediction:
    work: str
    measured: float  # output tokens a second
    predicted: float

    @property
    def off(self) -> float:
        """As a share of what was measured; below 0 where the simulator is too slow."""
        return self.predicted / self.measured - 1


def run(engine: Engine, requests: tuple[TraceRequest, ...]) -> Measured:
    """One turn of a workload. The engine must be idle, and share no prefixes."""
    prompts = Prompts(engine.model_config.vocab_size)
    output_tokens = 0

    def take(delta: TextDelta) -> None:
        nonlocal output_tokens
        output_tokens += len(delta.token_ids)

    for number, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        engine.add(engine.make_request(str(number), prompts.make(request), params), take)
    engine.steps.take()
    step_s: list[float] = []
    sizes: list[tuple[int, int]] = []
    begin_s = before_s = time.perf_counter()
    while engine.has_work:
        computed = engine.step()
        now_s = time.perf_counter()
        if computed:  # the last call only delivers
            step_s.append(now_s - before_s)
            sizes += [(step.num_tokens, step.num_sequences) for step in engine.steps.take()]
        before_s = now_s
    return Measured(step_s, sizes, before_s - begin_s, output_tokens)


def measure(engine: Engine, requests: tuple[TraceRequest, ...], turns: int) -> Measured:
    """Medians of several turns, step by step, after one that is not counted."""
    run(engine, requests)
    runs = [run(engine, requests) for _ in range(turns)]
    return Measured(
        [statistics.median(times) for times in zip(*(turn.step_s for turn in runs), strict=True)],
        runs[0].sizes,
        statistics.median(turn.total_s for turn in runs),
        runs[0].output_tokens,
    )


def shape_of(engine: Engine) -> ModelShape:
    config = engine.model_config
    dtype = resolve_dtype(engine.config.dtype, config.torch_dtype, resolve_device(engine.config.device))
    return ModelShape.of(config, dtype.itemsize)


def simulate(
    engine: Engine, card: Card, requests: tuple[TraceRequest, ...], measured: Measured
) -> tuple[float, list[StepWork]]:
    """The same workload on a card: output tokens a second, and what each step computes. Raises
    `StepsDiffer`."""
    shape, stats = shape_of(engine), engine.stats()
    plans: list[StepPlan] = []
    report = Replay(engine.config, card, shape, stats.num_blocks, on_step=plans.append).run(requests)
    sizes = [(plan.num_tokens, len(plan.slices)) for plan in plans]
    if sizes != measured.sizes:
        raise StepsDiffer(
            f"the engine took {len(measured.sizes)} steps and the simulator {len(sizes)}; the first "
            f"(tokens, sequences) were {measured.sizes[:3]} and {sizes[:3]}"
        )
    return report.output_tokens_per_s, [work_of(plan, shape) for plan in plans]


def calibrate(
    engine: Engine,
    fitted: tuple[TraceRequest, ...],
    predicted: Mapping[str, tuple[TraceRequest, ...]],
    turns: int,
) -> tuple[Card, list[Prediction]]:
    """The card, and first how well it tells the workload that it was fitted to. Raises `StepsDiffer`."""
    measured = measure(engine, fitted, turns)
    any_card = Card(1e12, 1e12, 0.0)
    card = fit(simulate(engine, any_card, fitted, measured)[1], measured.step_s)
    told = [Prediction("fitted", measured.output_tokens_per_s, simulate(engine, card, fitted, measured)[0])]
    for name, requests in predicted.items():
        measured = measure(engine, requests, turns)
        rate, _ = simulate(engine, card, requests, measured)
        told.append(Prediction(name, measured.output_tokens_per_s, rate))
    return card, told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3, help="of each workload; medians are taken")
    parser.add_argument("--card", type=Path, help="a JSON file to write the four numbers to")
    args = parser.parse_args()
    engine = Engine(
        {
            "model": args.model,
            "dtype": args.dtype,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "enable_prefix_caching": False,  # the turns repeat the prompts
            "seed": 0,
        }
    )
    try:
        card, told = calibrate(engine, FITTED, PREDICTED, args.turns)
    except StepsDiffer as error:
        sys.exit(f"error: {error}")
    print(
        f"{card.flops_per_s / 1e9:.0f} GFLOP/s and {card.bytes_per_s / 1e9:.1f} GB/s, attention "
        f"at {card.attention_share:.2f} of them, {1e3 * card.overhead_s:.2f} ms a step; "
        f"{ops.num_threads()} threads"
    )
    print(f"  {'work':16}{'measured':>10}{'predicted':>11}   output tokens/s")
    for row in told:
        print(f"  {row.work:16}{row.measured:10.1f}{row.predicted:11.1f}   {row.off:+.1%}")
    if args.card:
        args.card.write_text(json.dumps(asdict(card), indent=1) + "\n")
    if any(abs(row.off) > MOST_OFF for row in told[1:]):
        sys.exit(f"a prediction is off by more than {MOST_OFF:.0%}")


if __name__ == "__main__":
    main()
