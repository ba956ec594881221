"""The claim `sharing`: several continuations of one prompt share its blocks, and copy no block without need.

Scheduler, block manager and worker are stepped by hand, so that every plan and block table can be seen.
Without sharing is what the same sequences would hold at the same time, each with blocks of its own. How many
copies are needed is reckoned from what forks where, not from what the block manager does:

- of a block that is not full and that k sequences share, k - 1 copies once each of them writes to it;
- of full blocks none.

So n samples of a prompt need n - 1 copies if its last block is not full, else none. Beams need in each step
that writes into the middle of a block as many as there are beams beyond those that others were made from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from claim import Bar, Claim, Panel, Result, markdown
from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.block_manager import BlockManager
from octavo.engine.scheduler import Scheduler
from octavo.engine.tokenizer import Tokenizer
from octavo.models.model_config import ModelConfig
from octavo.protocol import Executor, StepPlan
from octavo.request import Request
from octavo.weights.loader import open_checkpoint
from octavo.worker.executor import LocalExecutor
from offline import SMOLLM2

BLOCK_SIZE = 16
# About the mean lengths of the two sets of prompts that the paper takes, and a prompt that fills its blocks.
LENGTHS = {"short": (19, 58), "long": (161, 338), "long, in full blocks": (160, 338)}
NUM_SAMPLES = 8
WIDTHS = (4, 6, 8)
MAX_MODEL_LEN = 512

_HEADER = (
    *("work", "prompt, output", "blocks at most, each its own", "shared", "saved", "in the mean"),
    *("copies", "needed", "answers that differ"),
)

_TEXT = """Once a sheet of paper was large and dear, and a printer thought well before he folded it. Folded
once it gave two leaves, a folio, and the book was for a lectern. Folded twice it gave four, a quarto, and
the book was for a table. Folded three times it gave eight leaves, an octavo, and the book went into a pocket
and from there wherever its reader went. The sheet was the same, the ink was the same, and so was the press;
what changed was only how the pages were laid out on the sheet before it was cut. A page that stood upside
down in a corner came to lie beside its neighbour once the knife had passed. Whoever wants to understand why
small books changed how people read, and what became of the printers who made them, should first of all know
that"""


class Bench:
    """A scheduler over an executor, whose results it takes step by step. Nothing is shared but within a
    request: there is no prefix cache."""

    def __init__(self, executor: Executor, num_blocks: int, config: EngineConfig) -> None:
        self._executor = executor
        self.blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.blocks)

    def run(self, *requests: tuple[list[int], SamplingParams]) -> "Held":
        """Requests that come together, to their end."""
        held = Held(self.blocks.block_size)
        copies_before = self.scheduler.counters.block_copies
        sequences = [
            seq
            for number, (prompt, params) in enumerate(requests)
            for seq in self.scheduler.add(Request(str(number), tuple(prompt), params))
        ]
        held.seeds = [seq.sampling.seed for seq in sequences]
        answers: dict[int, list[int]] = {seq.id: [] for seq in sequences}
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None, "there is work, but nothing is scheduled"
            self._executor.submit(plan)
            held.note(plan, self.blocks.num_used_blocks, sum(len(seq.block_table) for seq in sequences))
            for output in self.scheduler.update(plan, self._executor.collect()):
                assert output.error is None, output.error
                answers[output.seq_id].extend(output.token_ids)
        self.scheduler.check_integrity()
        held.copies = self.scheduler.counters.block_copies - copies_before
        held.answers = list(answers.values())
        return held


@dataclass
class Held:
    """What requests held, step by step: blocks, and blocks if every sequence had its own."""

    block_size: int
    used: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    copies: int = 0
    needed: int = 0
    seeds: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    _num_forked: int = 0  # in the step before

    def note(self, plan: StepPlan, used: int, own: int) -> None:
        self.used.append(used)
        self.own.append(own)
        # Sequences beyond those that had blocks of their own, and that write to one from here on.
        if plan.choices:
            beyond = len(plan.choices) - len({choice.parent_id for choice in plan.choices})
        else:
            beyond = self._num_forked
        if plan.slices[0].start % self.block_size:
            self.needed += beyond
        self._num_forked = len(plan.forks)

    @property
    def saved(self) -> float:
        return 1 - max(self.used) / max(self.own)

    @property
    def mean_saved(self) -> float:
        return 1 - sum(self.used) / sum(self.own)


def sampling(num_tokens: int, n: int = 1, seed: int = 0) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=num_tokens, ignore_eos=True)


def beams(num_tokens: int, width: int) -> SamplingParams:
    return SamplingParams(use_beam_search=True, beam_width=width, max_tokens=num_tokens, ignore_eos=True)


def differing(bench: Bench, prompt: list[int], num_tokens: int, held: Held) -> int:
    """How many of the answers of `n` samples are other than those of as many requests with their seeds."""
    alone = bench.run(*((prompt, sampling(num_tokens, seed=seed)) for seed in held.seeds))
    assert alone.used == alone.own
    return sum(one != other for one, other in zip(held.answers, alone.answers, strict=True))


def smollm2(dtype: str) -> Bench:
    config = EngineConfig(
        model=SMOLLM2,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**30,
        seed=0,
    ).for_model(MAX_MODEL_LEN)
    checkpoint = open_checkpoint(config.model)
    executor = LocalExecutor(config, checkpoint, ModelConfig.from_dict(checkpoint.config()))
    return Bench(executor, executor.num_blocks, config)


def works() -> Iterator[tuple[str, str, SamplingParams]]:
    for name, (_, num_tokens) in LENGTHS.items():
        yield f"n = {NUM_SAMPLES}", name, sampling(num_tokens, NUM_SAMPLES)
        for width in WIDTHS:
            yield f"beam width {width}", name, beams(num_tokens, width)


def measure() -> Result:
    text = Tokenizer.load(SMOLLM2).encode(_TEXT.replace("\n", " "))
    bench = smollm2("bfloat16")
    rows: list[tuple[str, ...]] = []
    bars: dict[str, list[Bar]] = {name: [] for name in LENGTHS}
    met = True
    for label, name, params in works():
        num_prompt_tokens, num_tokens = LENGTHS[name]
        prompt = text[:num_prompt_tokens]
        held = bench.run((prompt, params))
        differ = "" if params.use_beam_search else f"{differing(bench, prompt, num_tokens, held)}"
        met = met and held.copies == held.needed and differ in ("", "0")
        own, used = f"{max(held.own)}", f"{max(held.used)}"
        rows.append(
            (
                *(label, f"{num_prompt_tokens}, {num_tokens}", own, used, f"{held.saved:.1%}"),
                *(f"{held.mean_saved:.1%}", f"{held.copies}", f"{held.needed}", differ),
            )
        )
        bars[name] += [Bar(f"{label}, each its own", max(held.own), own, True)]
        bars[name] += [Bar(f"{label}, shared", max(held.used), used)]
    panels = [
        Panel(f"KV blocks at most, {LENGTHS[name][0]} tokens in, {LENGTHS[name][1]} out", tuple(bars[name]))
        for name in LENGTHS
    ]
    return Result(markdown(_HEADER, rows), met, tuple(panels))


SHARING = Claim(measure, exact=False)
