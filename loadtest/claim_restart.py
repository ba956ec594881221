"""The claim `restart`: a server that starts anew finds in its directory what the one before has computed.

Three engines, one after the other, take prompts with the same beginnings. The first computes them; the second
finds them in files that the system still has in memory; the third in files that it has to read from the disk.
Between a request and its first token lies all that a server does: hashing the prompt, reading and checking
files, copying blocks to the KV cache, and the step that computes the question.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from claim import Bar, Claim, Panel, Result, markdown
from claim_engine import Make, Run, running, smollm2, tokens

GOAL = 5  # times: how much earlier the first token comes
BLOCK_SIZE = 16
PREFIX_TOKENS = 2000
QUESTION_TOKENS = 20
NUM_PREFIXES = 5
FROM_THE_DISK = "found in files, read from the disk itself"

_HEADER = (
    f"prefix of {PREFIX_TOKENS:,} tokens",
    "first token, p50, ms",
    "times lower",
    "tokens computed",
    "MB read",
)


@dataclass
class Start:
    """What one engine made of the prompts."""

    label: str
    first_s: list[float] = field(default_factory=list)
    computed: int = 0  # tokens, of all prompts
    loaded_bytes: int = 0

    @property
    def median_ms(self) -> float:
        return 1e3 * median(self.first_s)


def take(run: Run, label: str, prefixes: list[list[int]], rng: np.random.Generator) -> Start:
    """Each prefix with a question of its own, one after another."""
    start = Start(label)
    run.add(tokens(rng, QUESTION_TOKENS), 2)
    run.drain()  # what only the first step of a process costs is not the prefix's
    for prefix in prefixes:
        client = run.add(prefix + tokens(rng, QUESTION_TOKENS), 1)
        start.computed += run.drain()
        start.first_s.append(client.first_s)
    start.loaded_bytes = run.engine.stats().disk_loaded_bytes_total
    return start


def forget(directory: Path) -> None:
    """Has the system drop what it keeps in memory of the files there."""
    for path in directory.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def starts(make: Make, num_prefixes: int = NUM_PREFIXES) -> list[Start]:
    rng = np.random.default_rng(0)
    prefixes = [tokens(rng, PREFIX_TOKENS) for _ in range(num_prefixes)]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "cache")
        for label in ("computed", "found in files", FROM_THE_DISK):
            if label == FROM_THE_DISK:
                forget(directory)
            engine = make(prefix_cache_dir=str(directory), block_size=BLOCK_SIZE, max_model_len=2304)
            with running([engine]) as (run,):
                measured.append(take(run, label, prefixes, rng))
    return measured


def measure() -> Result:
    measured = starts(smollm2)
    cold, *warm = measured
    gains = [cold.median_ms / start.median_ms for start in measured]
    rows = [
        (
            start.label,
            f"{start.median_ms:,.0f}",
            f"{gain:.1f}",
            f"{start.computed:,}",
            f"{start.loaded_bytes / 1e6:,.0f}",
        )
        for start, gain in zip(measured, gains, strict=True)
    ]
    bars = [Bar(start.label, start.median_ms, f"{start.median_ms:,.0f}", start is cold) for start in measured]
    met = min(gains[1:]) >= GOAL and all(start.loaded_bytes > 0 for start in warm)
    return Result(markdown(_HEADER, rows), met, (Panel("first token, p50, ms", tuple(bars)),))


RESTART = Claim(measure, exact=False)
