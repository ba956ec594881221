"""Continuous batching: which tokens of which sequences the next step computes. Torch-free.

Owned by the engine thread. The scheduler is the single writer of `Sequence`; `schedule` hands out an
immutable `StepPlan`, `update` takes the result of that plan back. A sequence may finish or be aborted while
its step is in flight: `update` then ignores what the step says of it.

There is no prefill phase and no decode phase: every running sequence computes as many of its uncomputed
tokens as the token budget allows. One rule thereby covers chunked prefill, prefix hits and resumption.
"""

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.engine.admission import WATERMARK, Admission, seats
from octavo.engine.beam_search import BeamGroup
from octavo.engine.block_manager import Appended, BlockManager
from octavo.engine.draft import Draft
from octavo.engine.embedding import embedding_of
from octavo.engine.pace import Pace
from octavo.engine.reception import Reception
from octavo.engine.row_sampling import take_prompt_logprobs
from octavo.engine.sequence import Sequence
from octavo.engine.step_times import StepTimes
from octavo.engine.swap_choice import SwapChoice
from octavo.engine.waiting_line import FairLine, RankedLine, WaitingLine
from octavo.protocol import (
    NewSequence,
    PooledPrompt,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.request import FinishReason, Request, SamplingParams

_rank, _arrival = attrgetter("rank"), attrgetter("arrival", "index")


class SequenceOutput(NamedTuple):
    """What a step did to one sequence. After a `finish_reason` or an `error` it is gone."""

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stopped_by_token: bool = False  # the last token is an EOS or stop token: it has no text
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # beside the first token, where wanted; see `Sequence`
    embedding: tuple[float, ...] | None = None  # of a prompt that was to become one


_output_of = partial(tuple.__new__, SequenceOutput)  # in half the time that its own constructor takes


@dataclass(slots=True)
class Counters:
    """Totals since the start, read by `Engine.stats`."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    block_copies: int = 0


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        eos_token_ids: Collection[int] = (),
        watermark: float = WATERMARK,
    ) -> None:
        assert config.max_model_len is not None
        self._max_model_len = config.max_model_len
        self._most_tokens = config.token_budget
        self._pace: Pace | None = None
        times = StepTimes()
        if config.target_itl_ms is not None:
            self._pace = Pace(config.target_itl_ms / 1e3, config.max_num_seqs, self._most_tokens)
            times = self._pace.times
        choice = SwapChoice(config.preemption_mode, block_manager.block_size, times)
        block_manager.host.choice = self._swap_choice = choice
        # Who wants to know how long steps take.
        self._note_time: Callable[[int, float], None] | None = None
        if self._pace is not None:
            self._note_time = self._pace.note
        elif choice.is_auto and block_manager.host.num_blocks:
            self._note_time = times.note
        self._chunked = config.enable_chunked_prefill
        self._max_num_seqs = config.max_num_seqs
        self._blocks = block_manager
        self._reception = Reception(config, block_manager, eos_token_ids)
        fair_line = FairLine() if config.fair_scheduling else None
        self._charge = fair_line.charge if fair_line is not None else None
        line: WaitingLine = RankedLine() if fair_line is None else fair_line
        self._admission = Admission(block_manager, config.max_num_seqs, line, watermark)
        self._live: dict[int, Sequence] = {}  # all that have not finished, unborn children too
        # By rank, or else one tenant's priority would throw another's requests out again and again.
        self._order = _rank if fair_line is None else _arrival
        self._running: list[Sequence] = []  # in that order
        self._dropped: list[int] = []  # rows for the worker to drop with the next plan
        self._num_steps = 0
        self._computed_tokens = 0  # in all steps
        self.counters = Counters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._admission)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def check(self, num_prompt_tokens: int, params: SamplingParams, *, embeds: bool = False) -> None:
        """Refuses what could never be served; a prompt that `embeds` needs no room for a new token. Any
        thread may call it."""
        self._reception.check(num_prompt_tokens, params, embeds=embeds)

    def add(self, request: Request) -> list[Sequence]:
        """Puts a request in line; returns its `num_sequences`. Raises like `check`."""
        sequences = self._reception.receive(request, self._computed_tokens)
        self._live.update((seq.id, seq) for seq in sequences)
        self._admission.add(sequences[0])
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        return sequences

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed."""
        self._blocks.host.open()
        self._blocks.disk.open()
        budget = self._most_tokens if self._pace is None else self._pace.budget
        draft = Draft(budget, self._blocks, self._charge)
        preempted = self._continue_running(draft)
        if not preempted:
            self._admit_waiting(draft)
        for seq in draft.born:
            insort(self._running, seq, key=self._order)
        if not draft.slices:
            return None
        self._num_steps += 1
        self._computed_tokens += budget - draft.budget
        self.counters.block_copies += len(draft.copies)
        dropped, self._dropped = self._dropped, []
        return draft.plan(self._num_steps, dropped)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Takes a step's result: advances, commits and finishes its sequences."""
        if self._note_time is not None:
            self._note_time(plan.num_tokens, result.forward_s + result.sample_s)
        if plan.swaps_out or plan.swaps_in:
            self._take_swaps(plan, result.swap_s)
        if plan.swaps_in or plan.loads:
            self._publish_known(plan)
        live, results = self._live, iter(result.sequences)
        commit, block_size = self._blocks.commit, self._blocks.block_size
        for part in result.prompt_logprobs:
            if part.seq_id in live:
                take_prompt_logprobs(live[part.seq_id], part)
        outputs: list[SequenceOutput] = []
        for slice_id, start, length, _, _, samples in plan.slices:
            end = start + length
            fills_block = end % block_size < length
            for seq_id in samples or (slice_id,):
                sampled = next(results) if samples else None
                seq = live.get(seq_id)
                if seq is None:  # finished or aborted while the step was in flight
                    continue
                seq.num_computed_tokens = end
                if sampled and sampled.error:
                    self._blocks.distrust(seq)
                elif fills_block:
                    commit(seq)
                if sampled and seq.beams is not None:
                    outputs.extend(self._take_beam(seq, seq.beams, sampled))
                elif sampled:
                    outputs.append(self._take_result(seq, sampled))
        outputs += [self._take_pooled(live[p.seq_id], p) for p in result.pooled if p.seq_id in live]
        self.finish(*[out.seq_id for out in outputs if out.finish_reason or out.error])
        return outputs

    def finish(self, *seq_ids: int) -> None:
        """Ends sequences and frees their blocks; ids that are gone already are fine.

        A parent and its unborn children end together: nobody else would ever schedule them.
        """
        gone = [seq for seq_id in seq_ids if (seq := self._live.pop(seq_id, None)) is not None]
        assert not any(child.id in self._live for seq in gone for child in seq.children)
        if any(seq.block_table for seq in gone):
            self._running = [seq for seq in self._running if seq.id in self._live]
        if not all(seq.block_table for seq in gone):
            self._admission.remove(lambda seq: seq.id not in self._live)
        for seq in gone:
            if seq.block_table:
                self._blocks.free(seq)
                self._dropped.append(seq.id)

    def check_integrity(self) -> None:
        """Raises `AssertionError` when an invariant of the scheduler or of its blocks does not hold."""
        self._blocks.check_integrity(self._live.values())
        assert self._running == sorted(self._running, key=self._order)
        taken = seats(self._running)
        assert taken <= self._max_num_seqs, f"{taken} seats taken"
        running = {seq.id for seq in self._running}
        for seq in self._live.values():
            assert bool(seq.block_table) == (seq.id in running), f"sequence {seq.id}: blocks, but not running"
            waits_for_beams = seq.beams is not None and seq.beams.awaits(seq)
            assert seq.num_computed_tokens < seq.num_tokens + waits_for_beams <= self._max_model_len
            assert len({member.id in running for member in seq.team}) == 1, f"sequence {seq.id}: lone beams"

    def _continue_running(self, draft: Draft) -> bool:
        """Gives every running sequence its share of the budget, in order of rank.

        When blocks run out, the last in rank is preempted. It is not scheduled yet, so nothing has to be
        rolled back, and the first in rank always advances. Returns whether anyone was preempted.
        """
        running, append = self._running, self._blocks.append
        preempted = False
        index = 0
        # Every sequence can have one token: a long prompt slows those behind it, but stops none.
        draft.budget -= len(running)
        while index < len(running):
            seq = running[index]
            if seq.beams is not None and seq.index == 0:
                # All beams get their next token now, or none does.
                if not self._blocks.can_append(seq.team):
                    preempted = True
                    if self._preempt_last(draft) is seq:
                        return True
                    continue
                draft.choices.extend(seq.beams.take_choices())
            length = len(seq.token_ids) - seq.num_computed_tokens
            if length == 0:  # a beam that is ahead of the others
                draft.budget += 1
                index += 1
                continue
            if length > 1:
                length = min(length, 1 + draft.budget)
                draft.budget -= length - 1
            while (appended := append(seq, length)) is None:
                preempted = True
                if self._preempt_last(draft) is seq:
                    return True
            draft.compute(seq, length, appended)
            index += 1
        return preempted

    def _admit_waiting(self, draft: Draft) -> None:
        self._admission.open()
        # Children born in this step hold the seats that their parent kept for them.
        seats_taken = seats(self._running) + seats(draft.born)
        while draft.budget > 0 and len(self._admission):
            most_tokens = None if self._chunked else draft.budget
            head = self._admission.take(seats_taken, most_tokens, draft.budget)
            if head is None:
                return
            team = head.team
            seats_taken += seats(team)
            draft.budget -= len(team)
            for seq in team:
                self._admit(draft, seq)

    def _admit(self, draft: Draft, seq: Sequence) -> None:
        """Starts a sequence that has blocks, a seat, and one token of the budget already."""
        seq.num_computed_tokens = self._blocks.allocate(seq)
        self.counters.prefix_queries += seq.num_tokens
        self.counters.prefix_hits += seq.num_computed_tokens
        if seq.num_generated_tokens == 0:
            self.counters.cached_prompt_tokens += seq.num_computed_tokens
        embed = seq.request.embed
        pooling = embed.pooling if embed else None
        draft.new.append(
            NewSequence(seq.id, tuple(seq.token_ids), seq.num_prompt_tokens, seq.sampling, pooling)
        )
        insort(self._running, seq, key=self._order)
        length = min(seq.num_uncomputed_tokens, 1 + draft.budget)
        draft.budget -= length - 1
        draft.compute(seq, length, Appended(0, tuple(seq.block_table)))

    def _preempt_last(self, draft: Draft) -> Sequence:
        """The last in rank, with its team: none of them is scheduled yet. Returns the first of the team."""
        team = self._running[-1].team
        del self._running[-len(team) :]
        draft.budget += len(team)
        self._preempt(team[0])
        return team[0]

    def _preempt(self, seq: Sequence) -> None:
        """Back into line, with its team, to be computed anew; blocks still in the cache make that cheap."""
        for member in seq.team:
            self._blocks.free(member)
            member.num_computed_tokens = 0
            self._dropped.append(member.id)
        if seq.beams is not None:
            seq.beams.restart()
        self._admission.add(seq)
        self.counters.preemptions += 1

    def _take_beam(self, seq: Sequence, beams: BeamGroup, result: SequenceResult) -> list[SequenceOutput]:
        """Nothing until the last beam's result that decides; then the answers, and the search is gone."""
        if result.error:
            outputs = [SequenceOutput(seq.id, (), (), None, error=result.error)]
        else:
            found = beams.report(seq, result.logprobs[0], self._blocks)
            if found is None:
                return []
            outputs = [
                SequenceOutput(member.id, h.token_ids, h.logprobs, h.finish_reason, h.finish_reason == "stop")
                for member, h in zip(beams.members, found, strict=False)
            ]
            self.counters.generation_tokens += sum(len(h.token_ids) for h in found)
        self.finish(*(member.id for member in beams.members))
        return outputs

    def _take_swaps(self, plan: StepPlan, swap_s: float) -> None:
        """The blocks that the plan copied to the host are there."""
        self._swap_choice.note(len(plan.swaps_out) + len(plan.swaps_in), swap_s)
        self._blocks.host.confirm()

    def _publish_known(self, plan: StepPlan) -> None:
        """The blocks that the plan copied to the device are there; other prompts may use them now."""
        for new in plan.new:
            seq = self._live.get(new.seq_id)
            if seq is not None:
                self._blocks.commit(seq)

    def _take_pooled(self, seq: Sequence, part: PooledPrompt) -> SequenceOutput:
        assert seq.request.embed is not None
        embedding = embedding_of(part.vector, seq.request.embed.dimensions)
        if embedding is None:
            self._blocks.distrust(seq)
            return SequenceOutput(seq.id, (), (), None, error="the prompt's hidden states are no numbers")
        return SequenceOutput(seq.id, (), (), "stop", embedding=embedding)

    def _take_result(self, seq: Sequence, result: SequenceResult) -> SequenceOutput:
        assert result.seq_id == seq.id, "results are not in the order of the plan's samples"
        seq_id, token_ids, logprobs, error = result
        if error:
            return SequenceOutput(seq_id, (), (), None, error=error)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        reason: FinishReason | None = None
        known, by_token = seq.token_ids, False
        num_known = len(known)
        for token_id in token_ids:
            known.append(token_id)
            by_token = token_id in seq.stop_ids and len(known) > seq.min_length
            if by_token or len(known) >= seq.max_length:
                taken = len(known) - num_known
                token_ids, logprobs = token_ids[:taken], logprobs[:taken]
                reason = "stop" if by_token else "length"
                break
        self.counters.generation_tokens += len(token_ids)
        return _output_of((seq_id, token_ids, logprobs, reason, by_token, None, prompt_logprobs, None))
