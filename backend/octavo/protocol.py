"""All that crosses from the scheduler to the executor and back. Typed, immutable, torch-free.

A `StepPlan` is a delta over rows that the worker keeps, one row a sequence: its token ids, its block
table and its sampling parameters. The worker applies a plan in this order:

1. `finished`: drop the rows (finished, aborted or preempted sequences)
2. `new`: make rows
3. `slices[*].block_ids`: write into the rows' block tables
4. `copies`: copy whole KV blocks (copy-on-write), before anything is written by this step
5. `forks`: the child's row becomes a copy of the parent's, block table included
6. forward over the token slices
7. sample for `slices[*].samples`, and append each sampled token to its row

Only the scheduler builds plans, on the engine thread; only an `Executor` reads them. What every sequence has
one of in every step is a named tuple, which is made in a third of the time of a frozen dataclass.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row is sampled. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 64 bits; with the token's position it determines the draw, whatever else is in the batch
    num_logprobs: int | None = None  # None: none; 0: the sampled token's only; N: the N best as well
    min_tokens: int = 0  # `stop_ids` cannot be sampled before so many tokens were generated
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A row to make. `token_ids` are all tokens known so far: a resumed sequence brings its output too."""

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: RowSampling


class Slice(NamedTuple):
    """Tokens [start, start + length) of one sequence, to be computed in this step.

    `block_ids`, if any, replace the row's block table from index `first_block` on (appended blocks, or
    the private copy of a block that was shared). `samples` are the sequences that sample from the logits of
    the slice's last token: the sequence itself and children forked in this step; empty while the slice
    does not reach the sequence's last token.
    """

    seq_id: int
    start: int
    length: int
    first_block: int = 0
    block_ids: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    parent_id: int
    child_id: int
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    slices: tuple[Slice, ...]
    new: tuple[NewSequence, ...] = ()
    forks: tuple[Fork, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    finished: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (of the untempered distribution) at one generated position.

    The sampled token comes first, then the best N in falling order, the sampled one left out of them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 is the most probable


class SequenceResult(NamedTuple):
    """What one sequence got. `error` is set when its row was unusable (a NaN), and then nothing else is."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # as long as token_ids, or empty when none were asked for
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    sequences: tuple[SequenceResult, ...]  # one for every id in the plan's `samples`, in that order
    forward_s: float = 0.0
    sample_s: float = 0.0


class Executor(Protocol):
    """Runs plans against a model. Depth is one for now: every `submit` is followed by its `collect`.

    What its caller does between the two should cost it no time: a device that computes by itself starts in
    `submit`, and an executor that computes on the calling thread does so in `collect`.
    """

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist."""

    def submit(self, plan: StepPlan) -> None:
        """Takes a step on. Raises `StepFailed`, like `collect`."""

    def collect(self) -> StepResult:
        """Waits for the oldest submitted step. Raises `StepFailed`: that step's sequences are lost."""

    def close(self) -> None: ...
