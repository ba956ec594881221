"""A sequence: one continuation of one prompt. Only the scheduler (and `BlockManager` for it) writes one."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.protocol import RowSampling, TokenLogprobs
from octavo.request import Request

if TYPE_CHECKING:
    from octavo.engine.beam_search import BeamGroup


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill and no decode: `num_computed_tokens` catches up with `num_tokens`.

    Invariants: `num_computed_tokens < num_tokens` between steps while it runs (they are equal while a beam
    waits for the others); while it waits its block table is empty and `num_computed_tokens` is 0. `children`
    are the request's other sequences until this one's prompt is computed and they fork off it.
    """

    id: int
    request: Request
    index: int  # which of the request's n sequences
    arrival: int  # a counter: smaller came earlier
    sampling: RowSampling
    stop_ids: frozenset[int]  # tokens that end it
    min_length: int  # tokens, the prompt's too, up to which none of them does
    max_length: int  # tokens, the prompt's too, at which it ends
    token_ids: "array[int]"  # of type "i": hashed as it lies in memory, and a tenth of the size of a list
    children: "tuple[Sequence, ...]" = ()
    is_sampled: bool = True  # whether tokens are to follow: not for a prompt that is embedded
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as anyone asked
    num_committed_blocks: int = 0  # leading blocks of the table whose hashes are published
    num_writable_tokens: int = 0  # up to here the table has slots, and no other sequence has those to come
    # Of the prompt's tokens from the second on, as far as they are computed; None: not wanted, or given out.
    prompt_logprobs: list[TokenLogprobs] | None = None
    beams: "BeamGroup | None" = None  # that it is one of
    precedence: int = 0  # by the scheduling policy: the lower, the earlier

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether more of them are to come, for which the prompt has to be computed: no cache holds them."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def team(self) -> "tuple[Sequence, ...]":
        """Who runs and waits together, first in rank first: itself alone, or all beams of a search once they
        have forked. In line the first stands for all."""
        return (self,) if self.beams is None else self.beams.team_of(self)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt must be computed, though a cache holds the KV blocks of some."""
        embed = self.request.embed
        return self.lacks_prompt_logprobs or (embed is not None and embed.pooling == "mean")

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts by who is served first: as the policy has it, then earlier arrival, then index."""
        return (self.precedence, self.arrival, self.index)
