"""All that crosses from the scheduler to the executor and back. Typed, immutable, torch-free.

A `StepPlan` is a delta over rows that the worker keeps, one row a sequence: its token ids, its block
table and its sampling parameters. The worker applies a plan in this order:

1. `finished`: drop the rows (finished, aborted or preempted sequences)
2. `new`: make rows
3. `choices`: rows go on from where another one stands, and with another last token
4. `slices[*].block_ids`: write into the rows' block tables
5. `discards`, `saves`, `swaps_out`: delete files; copy KV blocks, as they stood before the step, to files and
   to the host
6. `copies`: copy whole KV blocks (copy-on-write), before anything is written by this step
7. `swaps_in`, `loads`: copy KV blocks from the host, among them what step 5 put there, and from files
8. `forks`: the child's row becomes a copy of the parent's, block table included
9. forward over the token slices
10. sample for `slices[*].samples`, and append each sampled token to its row

Only the scheduler builds plans, on the engine thread; only an `Executor` reads them. What every sequence has
one of in every step is a named tuple, which is made in a third of the time of a frozen dataclass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.request import Pooling


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row is sampled. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 64 bits; with the token's position it determines the draw, whatever else is in the batch
    num_logprobs: int | None = None  # None: none; N: of the sampled token and the N best; see TokenLogprobs
    min_tokens: int = 0  # `stop_ids` cannot be sampled before so many tokens were generated
    stop_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int | None = None  # the same for every prompt token but the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens, each named once
    repetition_penalty: float = 1.0  # above 0; for all tokens so far
    frequency_penalty: float = 0.0  # for generated tokens, as often as they were
    presence_penalty: float = 0.0  # for generated tokens, once
    allowed_ids: tuple[int, ...] | None = None  # nothing else can be sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that cannot be generated one after the other


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A row to make. `token_ids` are all tokens known so far: a resumed sequence brings its output too."""

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: RowSampling
    pooling: Pooling | None = None  # its prompt becomes a vector, and nothing is sampled


class Slice(NamedTuple):
    """Tokens [start, start + length) of one sequence, to be computed in this step.

    `block_ids`, if any, replace the row's block table from index `first_block` on (appended blocks, or
    the private copy of a block that was shared). `samples` are the sequences that sample from the logits of
    the slice's last token: the sequence itself and children forked in this step; empty while the slice
    does not reach the sequence's last token, and of a sequence that is pooled.
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


class Choice(NamedTuple):
    """How a row goes on whose next token is not the worker's to choose: a beam's.

    It gets the tokens and the block table of the row of `parent_id`, which may be itself, with `token_id` in
    place of the token that was sampled last. Nobody is the parent of a row and gets another one's tokens too.
    """

    seq_id: int
    parent_id: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    destination: int


class Swap(NamedTuple):
    """One KV block, and the slot of host memory that gets its content, or has what it gets.

    In a plan no slot is written twice, nor written when `swaps_in` reads what it had before.
    """

    block_id: int
    slot: int


class BlockFile(NamedTuple):
    """One KV block, and the file of the prefix cache's directory that gets its content, or has what it gets.

    A file is named by its block's digest, in hexadecimal digits.
    """

    block_id: int
    digest: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    slices: tuple[Slice, ...]
    new: tuple[NewSequence, ...] = ()
    forks: tuple[Fork, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    finished: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    swaps_out: tuple[Swap, ...] = ()
    swaps_in: tuple[Swap, ...] = ()
    saves: tuple[BlockFile, ...] = ()
    loads: tuple[BlockFile, ...] = ()
    discards: tuple[str, ...] = ()  # digests of files that are to be deleted

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the distribution as the model gave it.

    The token that stands there comes first, then the best N in falling order, that one left out of them; for
    an N of 0, the best where it is more probable.
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


class PromptLogprobs(NamedTuple):
    """Of consecutive tokens of a prompt, from `position` on: those that follow the tokens of one slice."""

    seq_id: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


class PooledPrompt(NamedTuple):
    """The vector of a prompt whose last token was in this step: a mean of hidden states, or the last one."""

    seq_id: int
    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    sequences: tuple[SequenceResult, ...]  # one for every id in the plan's `samples`, in that order
    # Until the hidden states are there; on a GPU, until they are queued, and 0 where nothing is waited for.
    forward_s: float = 0.0
    sample_s: float = 0.0  # from there until the tokens are
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    swap_s: float = 0.0  # that `swaps_out` and `swaps_in` took, in none of the other times


class Executor(Protocol):
    """Runs plans against a model. Depth is one for now: every `submit` is followed by its `collect`.

    What its caller does between the two should cost it no time: a device that computes by itself starts in
    `submit`, and an executor that computes on the calling thread does so in `collect`.
    """

    @property
    def num_blocks(self) -> int:
        """KV blocks that exist."""

    @property
    def num_host_blocks(self) -> int:
        """Slots of host memory, each for the content of one KV block."""

    def submit(self, plan: StepPlan) -> None:
        """Takes a step on. Raises `StepFailed`, like `collect`."""

    def collect(self) -> StepResult:
        """Waits for the oldest submitted step. Raises `StepFailed`: that step's sequences are lost."""

    def close(self, keep: Iterable[BlockFile] = (), discards: Iterable[str] = ()) -> None:
        """No more steps come. Blocks to `keep` are saved as far as a few seconds allow, the first ones first;
        files to discard are deleted."""
