"""The claim `prefix`: a prompt's beginning that somebody computed before is not computed again.

One engine with the prefix cache and one without take the same prompts, in turns. What they compute is counted
and has to be what `Figure.expected` reckons; times are this machine's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from claim import Bar, Claim, Panel, Result, markdown
from claim_engine import Make, Run, running, smollm2, tokens
from octavo.serving.metric_tables import GAUGES, Snapshot

GOAL = 8  # times: how much earlier the first token comes where the prefix is warm
BLOCK_SIZE = 16
SYSTEM_TOKENS = 512
QUESTION_TOKENS = (12, 33)  # the fewest, and one more than the most
CHAT_TOKENS = (150, 250)  # of a chat's first prompt
ANSWER_TOKENS = 64
NUM_TURNS = 3
CROWDED_BLOCKS = 128  # of which the system prompt takes 32
CROWDED_TAIL_TOKENS = (96, 128)

_HEADER = ("prefix cache", "off", "on", "on, as reckoned", "off / on")
_FIRST = "first token of the warm ones, p50, ms"


@dataclass(frozen=True)
class Figure:
    """`off` and `on` the prefix cache; `expected` is what `on` has to be, where that can be reckoned."""

    label: str
    off: float | None
    on: float
    expected: float | None = None

    @property
    def gain(self) -> float | None:
        return None if self.off is None else self.off / max(self.on, 1e-9)

    def cells(self) -> tuple[str, ...]:
        gain = "" if not self.gain else f"{self.gain:.1f}"
        return (self.label, *map(self._shown, (self.off, self.on, self.expected)), gain)

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.2%}" if value < 1 else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


@dataclass
class Taken:
    """What one engine made of a set of prompts."""

    computed: int
    first_s: list[float]


def hit_rate(run: Run) -> float:
    """As the server's metric has it."""
    (series,) = [series for series in GAUGES if series.name == "octavo:prefix_cache_hit_rate"]
    return series.value(Snapshot(run.engine.stats(), True, 0, {}, {})) or 0.0


def one_after_another(runs: Sequence[Run], prompts: Sequence[list[int]]) -> list[Taken]:
    taken = [Taken(0, []) for _ in runs]
    for prompt in prompts:
        for run, result in zip(runs, taken, strict=True):
            client = run.add(prompt, 1)
            result.computed += run.drain()
            result.first_s.append(client.first_s)
    return taken


def together(runs: Sequence[Run], prompts: Sequence[list[int]]) -> list[Taken]:
    taken = []
    for run in runs:
        clients = [run.add(prompt, 1) for prompt in prompts]
        taken.append(Taken(run.drain(), [client.first_s for client in clients]))
    return taken


def users_of_one_prompt(off: Run, on: Run, num_users: int, rng: np.random.Generator) -> list[Figure]:
    """One system prompt and a question of each user's own, one after another, then another one together."""
    figures = []
    num_tokens = 0
    for label, arrive in {"one after another": one_after_another, "together": together}.items():
        system = tokens(rng, SYSTEM_TOKENS)
        questions = [tokens(rng, int(rng.integers(*QUESTION_TOKENS))) for _ in range(num_users)]
        prompts = [system + question for question in questions]
        without, cached = arrive([off, on], prompts)
        num_tokens += sum(map(len, prompts))
        expected = SYSTEM_TOKENS + sum(map(len, questions))
        assert without.computed == sum(map(len, prompts))
        figures += [
            Figure(f"{label}: prompt tokens computed", without.computed, cached.computed, expected),
            Figure(
                f"{label}: {_FIRST}",
                1e3 * median(without.first_s[1:]),
                1e3 * median(cached.first_s[1:]),
            ),
        ]
    hits = 2 * (num_users - 1) * SYSTEM_TOKENS
    rate = Figure("`octavo:prefix_cache_hit_rate`", hit_rate(off), hit_rate(on), hits / num_tokens)
    return [*figures, rate]


def chats(off: Run, on: Run, num_chats: int, rng: np.random.Generator) -> list[Figure]:
    """Each turn's prompt is all that was said, answers included, and a new question."""
    first = [tokens(rng, int(rng.integers(*CHAT_TOKENS))) for _ in range(num_chats)]
    said = {run: [list(prompt) for prompt in first] for run in (off, on)}
    figures = []
    for turn in range(NUM_TURNS):
        computed = {}
        # The last token of an answer is not computed before somebody goes on from it.
        known = [turn and (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in said[on]]
        questions = [tokens(rng, int(rng.integers(*QUESTION_TOKENS))) if turn else [] for _ in first]
        for run, prompts in said.items():
            for prompt, question in zip(prompts, questions, strict=True):
                prompt += question
            clients = [run.add(prompt, ANSWER_TOKENS) for prompt in prompts]
            computed[run] = run.drain() - num_chats * (ANSWER_TOKENS - 1)
            for prompt, client in zip(prompts, clients, strict=True):
                prompt += client.token_ids
        if turn:
            lengths = [len(prompt) - ANSWER_TOKENS for prompt in said[on]]
            expected = sum(lengths) - sum(known)
            label = f"{num_chats} chats, turn {turn + 1}: prompt tokens computed"
            figures.append(Figure(label, computed[off], computed[on], expected))
    return figures


def under_pressure(on: Run, num_users: int, rng: np.random.Generator) -> list[Figure]:
    """A cache that holds the system prompt and a few tails: how many tokens are found in it."""

    def found(prompt: list[int]) -> int:
        on.add(prompt, 1)
        return len(prompt) - on.drain()

    system = tokens(rng, SYSTEM_TOKENS)
    prompts = [system + tokens(rng, int(rng.integers(*CROWDED_TAIL_TOKENS))) for _ in range(num_users)]
    by_users = sum(map(found, prompts))
    # As many blocks as the tails have, of prompts that nobody shares.
    for _ in range(CROWDED_BLOCKS * BLOCK_SIZE // SYSTEM_TOKENS - 1):
        assert found(tokens(rng, SYSTEM_TOKENS)) == 0
    by_first = found(prompts[0])
    return [
        Figure(
            f"cache of {CROWDED_BLOCKS} blocks: tokens found by {num_users} users of one prompt",
            None,
            by_users,
            (num_users - 1) * SYSTEM_TOKENS,
        ),
        Figure("and by the first, again, once others took what all tails had", None, by_first, SYSTEM_TOKENS),
    ]


def figures(make: Make, num_users: int, num_chats: int) -> list[Figure]:
    rng = np.random.default_rng(0)
    common = {"block_size": BLOCK_SIZE, "max_model_len": 1024}
    with running(make(enable_prefix_caching=caching, **common) for caching in (False, True)) as (off, on):
        measured = users_of_one_prompt(off, on, num_users, rng) + chats(off, on, num_chats, rng)
    with running([make(num_gpu_blocks_override=CROWDED_BLOCKS, **common)]) as (crowded,):
        return measured + under_pressure(crowded, num_users, rng)


def measure() -> Result:
    measured = figures(smollm2, num_users=100, num_chats=8)
    warm = next(figure for figure in measured if figure.label.endswith(_FIRST))
    as_reckoned = all(figure.on == figure.expected for figure in measured if figure.expected is not None)

    def panel(title: str, end: str) -> Panel:
        bars = []
        for figure in (figure for figure in measured if figure.label.endswith(end)):
            label = figure.label.removesuffix(f": {end}")
            _, off, on, *_ = figure.cells()
            assert figure.off is not None
            bars += [Bar(f"{label}, off", figure.off, off, True), Bar(f"{label}, on", figure.on, on)]
        return Panel(title, tuple(bars))

    panels = panel("prompt tokens computed", "prompt tokens computed"), panel(_FIRST, _FIRST)
    met = as_reckoned and warm.gain is not None and warm.gain >= GOAL
    return Result(markdown(_HEADER, [figure.cells() for figure in measured]), met, panels)


PREFIX = Claim(measure, exact=False)
