"""A scheduler over a simulated executor that checks every KV slot it reads: what its tests have in common."""

from collections import Counter, defaultdict
from collections.abc import Collection

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.config import EngineConfig
from octavo.engine.block_manager import BlockManager
from octavo.engine.scheduler import Scheduler
from octavo.errors import StepFailed
from octavo.protocol import StepPlan, StepResult
from octavo.request import Request, SamplingParams
from simulated import VOCAB, SimulatedExecutor, expected_beams, expected_tokens


class Run:
    """A scheduler, its blocks and the executor; what comes out, and what should."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        has_directory: bool = False,
        eos: tuple[int, ...] = (),
        **config: object,
    ) -> None:
        arguments = {"model": "m", "block_size": 4, "max_model_len": 40, "max_num_seqs": 8, "seed": 1}
        arguments |= {"max_num_batched_tokens": 32, **config}
        self.config = EngineConfig(**arguments).for_model(4096)
        size = self.config.block_size
        self.blocks = BlockManager(
            num_blocks, size, self.config.enable_prefix_caching, num_host_blocks, has_directory
        )
        self.scheduler = Scheduler(self.config, self.blocks, eos)
        self.executor = SimulatedExecutor(num_blocks, size, num_host_blocks)
        self.requests: list[list[int]] = []  # the ids of each one's sequences
        self.expected: dict[int, list[int]] = {}  # by sequence; of a search, the first n are its answers
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, str | None] = {}
        self.ends: Counter[int] = Counter()
        self.plans: list[StepPlan] = []
        self.most_blocks = 0

    def add(
        self,
        prompt: list[int],
        priority: int = 0,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        **params: object,
    ) -> list[int]:
        request = Request(
            f"r{len(self.requests)}",
            tuple(prompt),
            SamplingParams(**params),
            priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        for digest in self.blocks.missing(request):
            if digest.hex() not in self.executor.files:
                break
            request.stored[digest] = "read"
        sequences = self.scheduler.add(request)
        ids = [seq.id for seq in sequences]
        self.requests.append(ids)
        assert self.config.max_model_len is not None
        if request.params.use_beam_search:
            found = expected_beams(prompt, request.params, self.config.max_model_len)
            found += [[]] * (len(ids) - request.params.n)
        else:
            seeds = [seq.sampling.seed for seq in sequences]
            found = [
                expected_tokens(prompt, request.params, seed, self.config.max_model_len) for seed in seeds
            ]
        self.expected.update(zip(ids, found, strict=True))
        return ids

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            return None
        self.plans.append(plan)
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert all(piece.length > 0 for piece in plan.slices)
        self.executor.submit(plan)
        self.update(plan, self.executor.collect())
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> None:
        self.most_blocks = max(self.most_blocks, self.blocks.num_used_blocks)
        for output in self.scheduler.update(plan, result):
            assert not self.ends[output.seq_id], "news of a sequence that has ended"
            self.tokens[output.seq_id].extend(output.token_ids)
            self.reasons[output.seq_id] = output.finish_reason
            self.ends[output.seq_id] += bool(output.finish_reason or output.error)
        self.scheduler.check_integrity()

    def drain(self, limit: int = 10_000) -> None:
        while self.scheduler.has_work:
            assert self.step() is not None, "there is work, but nothing is scheduled"
            limit -= 1
            assert limit, "does not come to an end"
        assert self.blocks.num_used_blocks == 0
        self.blocks.check_integrity([])
        self.executor.submit(StepPlan(0, (), finished=tuple(self.scheduler._dropped)))
        assert not self.executor.rows, "the worker keeps rows of sequences that are gone"

    def check(self, *seq_ids: int, aborted: Collection[int] = ()) -> None:
        """These, all by default, have ended once, with the tokens that are expected; the aborted at most
        once, with some of them. Beams beyond the answers say nothing."""
        for seq_id in seq_ids or self.expected:
            tokens, expected = self.tokens[seq_id], self.expected[seq_id]
            assert all(0 <= token < VOCAB for token in tokens)
            if seq_id in aborted:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                assert self.ends[seq_id] == bool(expected)


class Programs(RuleBasedStateMachine):
    """Random programs of steps, aborts and failing steps. What begins a `run` and adds to it is a test's."""

    run: Run

    def __init__(self) -> None:
        super().__init__()
        self.aborted: set[int] = set()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        ids = data.draw(st.sampled_from(self.run.requests))
        plan = self.run.scheduler.schedule() if in_flight else None
        if plan:
            self.run.executor.submit(plan)
        self.run.scheduler.finish(*ids)
        self.aborted.update(ids)
        if plan:
            self.run.update(plan, self.run.executor.collect())

    @rule()
    def fail_a_step(self) -> None:
        """As the engine does it: the requests in a failed step end, the others go on."""
        plan = self.run.scheduler.schedule()
        if plan is None:
            return
        self.run.executor.fail_next = True
        with pytest.raises(StepFailed, match="made to fail"):
            self.run.executor.submit(plan)
        self._end_requests({piece.seq_id for piece in plan.slices})

    @rule(data=st.data())
    def spoil_a_row(self, data: st.DataObject) -> None:
        """A row of NaN ends its request, and what it wrote is never used again."""
        plan = self.run.scheduler.schedule()
        if plan is None:
            return
        rows = [piece.samples for piece in plan.slices if piece.samples]
        spoilt = data.draw(st.sampled_from(rows)) if rows else ()
        self.run.executor.nan_rows.update(spoilt)
        self.run.executor.submit(plan)
        self.run.update(plan, self.run.executor.collect())
        self._end_requests(set(spoilt))

    def _end_requests(self, seq_ids: set[int]) -> None:
        for ids in self.run.requests:
            if seq_ids.intersection(ids):
                self.run.scheduler.finish(*ids)
                self.aborted.update(ids)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "run"):
            self.run.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.drain()
            self.run.check(aborted=self.aborted)
