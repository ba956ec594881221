"""The engine's own work in a decode step, without a model: what a step costs beside its forward.

    python loadtest/step_loop.py --sequences 32 256 1000

Scheduler, block manager, the worker's rows, its inputs and its results are the real ones; only the forward is
left out, and sampled tokens are made up. Each step is timed in parts:

    schedule   the scheduler's plan
    input      the plan applied to the worker's rows, the tensors of the forward, what the sampler is told
    result     the sampled tokens back into the rows and into a `StepResult`
    update     the scheduler takes the result
    deliver    tokens to text, and text to the sinks; by itself, since a step need not wait for it

`step` is the sum of the first four. Milliseconds of this thread's CPU time, so that other work on the machine
counts little; the medians over `--steps` steps, with the garbage collector as a server has it, and beside the
sum its 99th percentile.
"""

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass

import numpy as np

from host_work import PARTS, HostWork
from octavo.config import EngineConfig
from octavo.engine.block_manager import BlockManager
from octavo.engine.delivery import Delivery
from octavo.engine.scheduler import Scheduler, SequenceOutput
from octavo.engine.tokenizer import Tokenizer
from octavo.request import Request, SamplingParams, TextDelta
from octavo.serving.quiet_collector import QuietCollector
from offline import SMOLLM2

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
PROMPT_TOKENS = (200, 300)  # the shortest and the longest
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Report:
    """Milliseconds of one step with so many sequences."""

    num_sequences: int
    schedule: float
    input: float
    result: float
    update: float
    step: float
    step_p99: float
    deliver: float


class StepLoop:
    """`num_sequences` that run, prompts computed, none of which ends within `num_steps` steps."""

    def __init__(self, num_sequences: int, num_steps: int) -> None:
        config = EngineConfig(
            model="none",
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=min(num_sequences * PROMPT_TOKENS[1], 2**20),
        )
        blocks_each = -(-(PROMPT_TOKENS[1] + num_steps + 2) // BLOCK_SIZE)
        blocks = BlockManager(int(1.1 * num_sequences * blocks_each) + 1, BLOCK_SIZE)
        tokenizer = Tokenizer.load(SMOLLM2)
        self._scheduler = Scheduler(config, blocks)
        self._host = HostWork(tokenizer.vocab_size, 3, BLOCK_SIZE)
        self._deliveries: dict[int, Delivery] = {}
        self.num_delivered_tokens = 0
        rng = random.Random(0)
        params = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
        for number in range(num_sequences):
            prompt = tuple(rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS)))
            request = Request(str(number), prompt, params)
            ids = [seq.id for seq in self._scheduler.add(request)]
            self._deliveries[ids[0]] = Delivery(request, self._take, tokenizer, ids)
        self.step()

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def step(self) -> dict[str, float]:
        """One step; the seconds that each part of it took."""
        self._host.begin()
        with self._host.timed("schedule"):
            plan = self._scheduler.schedule()
        assert plan is not None
        for new in plan.new:
            self._deliveries[new.seq_id].timeline.enter_batch(0)
        result = self._host.execute(plan)
        with self._host.timed("update"):
            outputs = self._scheduler.update(plan, result)
        with self._host.timed("deliver"):
            self._deliver(outputs)
        return self._host.spent_s

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._deliveries[output.seq_id].deliver(output)

    def _take(self, delta: TextDelta) -> None:
        self.num_delivered_tokens += len(delta.token_ids)


def measure(num_sequences: int, num_steps: int) -> Report:
    """Medians over so many decode steps, after a few that are not counted."""
    loop = StepLoop(num_sequences, num_steps + WARM_UP_STEPS)
    for _ in range(WARM_UP_STEPS):
        loop.step()
    collector = QuietCollector()
    collector.start()
    try:
        spent = [loop.step() for _ in range(num_steps)]
    finally:
        collector.close()
    steps = [sum(step[part] for part in PARTS) for step in spent]
    parts = {part: 1e3 * statistics.median(step[part] for step in spent) for part in (*PARTS, "deliver")}
    return Report(
        num_sequences, step=1e3 * statistics.median(steps), step_p99=1e3 * np.quantile(steps, 0.99), **parts
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print a JSON object a line instead of a table")
    args = parser.parse_args()
    columns = [*PARTS, "step", "step_p99", "deliver"]
    if not args.json:
        print("sequences" + "".join(f"{column:>10}" for column in columns) + "   (ms)")
    for num_sequences in args.sequences:
        report = asdict(measure(num_sequences, args.steps))
        if args.json:
            print(json.dumps(report))
        else:
            print(f"{num_sequences:9}" + "".join(f"{report[column]:10.3f}" for column in columns))


if __name__ == "__main__":
    main()
