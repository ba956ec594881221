"""Beam search: which continuations of a prompt go on, and which of those that ended are the answer.

`BeamSearch` decides and knows nothing of sequences; `BeamGroup` moves the sequences accordingly, on behalf of
the scheduler, which owns one for each such request. Engine thread, torch-free.

A search keeps `width` beams. In each step every beam says what its best next tokens are; of all these
continuations the best by summed log-probability go on. Beams without a successor take over the tokens and,
shared, the blocks of a beam that has several: a fork. What is searched is what Transformers' `generate`
searches with `num_beams`, so that the answers are the same.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.block_manager import BlockManager
from octavo.engine.sequence import Sequence
from octavo.errors import InvalidArgument
from octavo.protocol import Choice, RowSampling, TokenLogprobs
from octavo.request import FinishReason, Request, SamplingParams


def check_room(
    num_prompt_tokens: int, params: SamplingParams, max_model_len: int, blocks: BlockManager
) -> None:
    """Raises `InvalidArgument` for a search that might not fit into the KV cache even alone. Its beams share
    blocks, but after a preemption each may have to be computed by itself."""
    length = min(num_prompt_tokens + params.max_tokens, max_model_len)
    needed = params.num_sequences * blocks.blocks_for(length)
    if needed > blocks.num_blocks:
        raise InvalidArgument(
            f"a beam search of width {params.num_sequences} over up to {length} tokens may need {needed} KV "
            f"blocks; this server has {blocks.num_blocks}: lower 'beam_width' or 'max_tokens'"
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that ended. `score` is its summed log-probability over its length to the power of
    `length_penalty`, the token that ended it included in both."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # as long as token_ids, or empty when none were asked for
    score: float
    finish_reason: FinishReason


class Successor(NamedTuple):
    """How a beam goes on: with the tokens of `parent`, which may be another beam or itself, and a new one."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A continuation as a chain of tokens, so that beams share what they have in common."""

    before: "_Node | None"
    token_id: int
    logprobs: TokenLogprobs | None
    total: float  # of the log-probabilities up to here

    def chain(self) -> "list[_Node]":
        nodes, node = [], self
        while node.before is not None:
            nodes.append(node)
            node = node.before
        return nodes[::-1]


class _Candidate(NamedTuple):
    total: float
    beam: int
    place: int  # in what the beam said


class BeamSearch:
    """The search of one request. `stop_ids` end a continuation, once it has more than `min_tokens`;
    `max_tokens` is where all end."""

    def __init__(self, request: Request, stop_ids: frozenset[int], max_tokens: int) -> None:
        params = request.params
        self.width = params.num_sequences
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._num_answers = params.n
        keeps_logprobs = request.cumulative_logprob or params.logprobs is not None
        self._num_logprobs = (params.logprobs or 0) if keeps_logprobs else None
        self._length = 0  # tokens of every beam
        self._beams = [_Node(None, 0, None, 0.0)]  # all begin as one, the prompt
        self._found: list[Hypothesis] = []  # the best that ended, falling; at most `width`

    @property
    def row_sampling(self) -> RowSampling:
        """What a beam's row asks of the worker: enough best tokens that `width` of them end nothing."""
        num_best = max(self.width + len(self._stop_ids), self._num_logprobs or 0)
        return RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_logprobs=num_best)

    def advance(self, best: Items[TokenLogprobs]) -> list[Successor] | None:
        """Takes one token for each beam. `best`: by beam, its best next tokens, in falling order. The first
        time all beams are the same, and the first one speaks for them.

        Returns by beam how it goes on, with at least one beam going on as itself for each parent named; None
        when the search is over.
        """
        self._length += 1
        last = self._length >= self._max_tokens
        ended, going_on = [], []
        for place, candidate in enumerate(self._candidates(best)):
            by_token = best[candidate.beam].token_ids[candidate.place] in self._stop_ids
            if by_token or last:
                # One that ended is worth keeping only if it is among the best `width` of all.
                if place < self.width:
                    ended.append(self._end(best, candidate, "stop" if by_token else "length"))
            else:
                going_on.append(candidate)
            if place + 1 >= self.width and (last or len(going_on) == self.width):
                break
        self._found = sorted(self._found + ended, key=lambda found: -found.score)[: self.width]
        if last or self._is_over(going_on[0].total):
            return None
        assert len(going_on) == self.width, "the beams name too few tokens"
        return self._succeed(best, going_on)

    def answers(self) -> list[Hypothesis]:
        """The `n` best that ended, best first. Call when the search is over."""
        return self._found[: self._num_answers]

    def _candidates(self, best: Items[TokenLogprobs]) -> list[_Candidate]:
        barred = self._stop_ids if self._length <= self._min_tokens else frozenset[int]()
        candidates = [
            _Candidate(beam.total + logprob, index, place)
            for index, beam in enumerate(self._beams)
            for place, (token_id, logprob) in enumerate(
                zip(best[index].token_ids, best[index].logprobs, strict=True)
            )
            if token_id not in barred
        ]
        candidates.sort(key=lambda candidate: -candidate.total)
        return candidates

    def _is_over(self, best_total: float) -> bool:
        """Whether nothing better is expected: `width` have ended, and the best beam as it is would score no
        better than the worst of them. With `early_stopping` their number is enough."""
        if len(self._found) < self.width:
            return False
        return self._early_stopping or self._score(best_total) <= self._found[-1].score

    def _score(self, total: float) -> float:
        return float(total / self._length**self._length_penalty)

    def _succeed(self, best: Items[TokenLogprobs], going_on: list[_Candidate]) -> list[Successor]:
        # The first successor of a beam stays in its place. The others fill the places of the beams that
        # have none, so no beam is overwritten while another is still to be made from it.
        first: dict[int, _Candidate] = {}
        others = []
        for candidate in going_on:
            if candidate.beam in first:
                others.append(candidate)
            else:
                first[candidate.beam] = candidate
        chosen = [first[index] if index in first else others.pop(0) for index in range(self.width)]
        self._beams = [self._node(best, candidate) for candidate in chosen]
        return [Successor(c.beam, best[c.beam].token_ids[c.place]) for c in chosen]

    def _end(self, best: Items[TokenLogprobs], candidate: _Candidate, reason: FinishReason) -> Hypothesis:
        nodes = self._node(best, candidate).chain()
        logprobs = tuple(node.logprobs for node in nodes if node.logprobs is not None)
        token_ids = tuple(node.token_id for node in nodes)
        return Hypothesis(token_ids, logprobs, self._score(candidate.total), reason)

    def _node(self, best: Items[TokenLogprobs], candidate: _Candidate) -> _Node:
        said, place = best[candidate.beam], candidate.place
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = _with_first(said, place, self._num_logprobs)
        return _Node(self._beams[candidate.beam], said.token_ids[place], logprobs, candidate.total)


def _with_first(best: TokenLogprobs, place: int, count: int) -> TokenLogprobs:
    """What a sampler that had chosen the token at `place` would say of it and of the `count` best."""
    others = range(count) if count else range(int(best.ranks[place] > 1))
    places = [place, *(other for other in others if other != place)]
    return TokenLogprobs(
        tuple(best.token_ids[i] for i in places),
        tuple(best.logprobs[i] for i in places),
        tuple(best.ranks[i] for i in places),
    )


class BeamGroup:
    """The sequences of a search, one a beam; all have the same number of tokens.

    They run and wait together. A beam whose next tokens are known has no uncomputed token and stays as it is
    until the others' are known too: they may be behind, since sequences resume in chunks.
    """

    def __init__(self, members: Items[Sequence], search: BeamSearch) -> None:
        self.members = tuple(members)
        self._search = search
        self._said: dict[int, TokenLogprobs] = {}  # by index of the member
        self._choices: tuple[Choice, ...] = ()  # that no step plan has carried yet

    @classmethod
    def form(cls, sequences: Items[Sequence]) -> None:
        """Makes all sequences of a new request the beams of a search."""
        first = sequences[0]
        search = BeamSearch(first.request, first.stop_ids, first.max_length - first.num_prompt_tokens)
        group = cls(sequences, search)
        for seq in sequences:
            seq.beams = group
            seq.sampling = search.row_sampling

    def team_of(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Whom a member runs with: nobody while the prompt is not computed, which is the first one's work."""
        return (seq,) if self.members[0].children else self.members

    def awaits(self, seq: Sequence) -> bool:
        """Whether the member has said its part of this step, and others have not."""
        return seq.index in self._said

    def take_choices(self) -> tuple[Choice, ...]:
        """What the worker must know before any of the members goes on."""
        choices, self._choices = self._choices, ()
        return choices

    def restart(self) -> None:
        """The members were preempted: they will be computed anew, and say again what they have said."""
        self._said.clear()
        self._choices = ()

    def report(self, seq: Sequence, best: TokenLogprobs, blocks: BlockManager) -> list[Hypothesis] | None:
        """A member's best next tokens. With the last member's all members move on, and get their next token.

        None while the search goes on; when it is over, what it has found, best first.
        """
        self._said[seq.index] = best
        if len(self._said) < len(self.members):
            return None
        successors = self._search.advance([self._said[index] for index in range(len(self.members))])
        self._said.clear()
        if successors is None:
            return self._search.answers()
        self._move(successors, blocks)
        return None

    def _move(self, successors: list[Successor], blocks: BlockManager) -> None:
        pairs = [(seq, self.members[s.parent]) for seq, s in zip(self.members, successors, strict=True)]
        for seq, parent in pairs:
            if seq is not parent:
                blocks.free(seq)
                blocks.fork(parent, seq)
                seq.token_ids = parent.token_ids[:]
                seq.num_computed_tokens = parent.num_computed_tokens
        for seq, successor in zip(self.members, successors, strict=True):
            seq.token_ids.append(successor.token_id)
        self._choices = tuple(
            Choice(seq.id, parent.id, successor.token_id)
            for (seq, parent), successor in zip(pairs, successors, strict=True)
        )
