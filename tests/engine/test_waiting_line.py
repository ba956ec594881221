"""Who is next: by rank as a rule, by turns of tenants where shares are to be fair."""

from array import array
from collections import Counter
from collections.abc import Iterable

import pytest

from octavo.config import EngineConfig
from octavo.engine import waiting_line
from octavo.engine.block_manager import BlockManager
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Sequence
from octavo.engine.waiting_line import FairLine, RankedLine
from octavo.protocol import RowSampling
from octavo.request import Request, SamplingParams
from simulated import SimulatedExecutor

_SAMPLING = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Server:
    """A scheduler with two seats over an executor that computes nothing."""

    def __init__(self, **config: object) -> None:
        arguments = {"model": "m", "block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "seed": 1}
        arguments |= {"max_num_batched_tokens": 32, **config}
        self.config = EngineConfig(**arguments).for_model(4096)
        self.blocks = BlockManager(64, 4, enable_prefix_caching=False)
        self.scheduler = Scheduler(self.config, self.blocks)
        self.executor = SimulatedExecutor(64, 4)
        self.names: dict[int, str] = {}  # of sequences
        self.started: list[str] = []
        self.steps_until: dict[str, int] = {}  # a request was finished
        self.num_steps = 0

    def add(self, name: str, tenant: str | None, *, priority: int = 0, max_tokens: int = 8) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, tuple(map(ord, name)), params, priority, tenant=tenant)
        for seq in self.scheduler.add(request):
            self.names[seq.id] = name

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.started += [self.names[new.seq_id] for new in plan.new]
        self.executor.submit(plan)
        self.num_steps += 1
        for output in self.scheduler.update(plan, self.executor.collect()):
            if output.finish_reason:
                self.steps_until[self.names[output.seq_id]] = self.num_steps
        self.scheduler.check_integrity()

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.blocks.num_used_blocks == 0


def busy(**config: object) -> Server:
    """Tenant `a` has brought 100 requests and runs two of them when `b` comes with a single one."""
    server = Server(**config)
    for number in range(100):
        server.add(f"a{number}", "a")
    for _ in range(3):
        server.step()
    server.add("b", "b")
    return server


def test_one_tenant_s_hundred_requests_do_not_delay_another_s_single_one() -> None:
    server = busy(fair_scheduling=True)
    server.drain()
    # It takes the first seat that becomes free, beside the two that had them.
    assert server.started[:3] == ["a0", "a1", "b"]
    assert server.steps_until["b"] == server.steps_until["a0"] + 8
    assert len(server.steps_until) == 101


def test_without_fair_shares_requests_are_taken_in_order_of_arrival() -> None:
    server = busy()
    server.drain()
    assert server.started == [*(f"a{number}" for number in range(100)), "b"]
    assert max(server.steps_until, key=server.steps_until.__getitem__) == "b"


def test_tenants_that_keep_asking_get_equal_tokens_however_they_cut_them() -> None:
    server = Server(fair_scheduling=True, max_num_seqs=1)
    for number in range(40):
        server.add(f"l{number}", "long", max_tokens=40)
    for number in range(400):
        server.add(f"s{number}", "short", max_tokens=4)
    tokens: Counter[str] = Counter()
    charge = server.scheduler._charge
    assert charge is not None

    def count(seq: Sequence, num_tokens: int) -> None:
        tokens[str(seq.request.tenant)] += num_tokens
        charge(seq, num_tokens)

    server.scheduler._charge = count
    for _ in range(1000):
        server.step()
        assert abs(tokens["long"] - tokens["short"]) <= 44  # one long request: prompt and output
    assert tokens["long"] > 400


def test_a_priority_counts_within_a_tenant_only() -> None:
    server = Server(fair_scheduling=True, max_num_seqs=1)
    server.add("a0", "a")
    server.step()
    server.add("a1", "a")
    server.add("a2", "a", priority=-1)
    server.add("b0", "b", priority=100)
    server.add("n0", None, priority=100)
    server.drain()
    assert server.started == ["a0", "b0", "n0", "a2", "a1"]


def test_nobody_saves_up_turns_while_away() -> None:
    server = Server(fair_scheduling=True, max_num_seqs=1)
    server.add("b0", "b")
    for number in range(20):
        server.add(f"a{number}", "a")
    while len(server.started) < 15:
        server.step()
    for number in range(1, 10):
        server.add(f"b{number}", "b")
    server.drain()
    late = server.started[15:24]
    assert Counter(name[0] for name in late)["b"] in (4, 5)


def line_of(line: RankedLine | FairLine, entries: Iterable[tuple[str, str | None, int]]) -> None:
    for number, (name, tenant, priority) in enumerate(entries):
        request = Request(name, (1,), priority=priority, tenant=tenant)
        line.add(
            Sequence(
                id=number,
                request=request,
                index=0,
                arrival=number,
                sampling=_SAMPLING,
                stop_ids=frozenset(),
                min_length=1,
                max_length=2,
                precedence=priority,
                token_ids=array("i", [1]),
            )
        )


@pytest.mark.parametrize("make", [RankedLine, FairLine])
def test_a_line_is_empty_counts_and_lets_go(make: type[RankedLine] | type[FairLine]) -> None:
    line = make()
    assert (len(line), line.head()) == (0, None)
    line_of(line, [("a", "t", 1), ("b", "t", 0), ("c", "u", 0), ("d", None, 0)])
    assert len(line) == 4
    line.remove(lambda seq: seq.request.id in "cd")
    assert len(line) == 2
    head = line.head()
    assert head is line.take()
    assert head is not None
    assert head.request.id == "b"
    assert line.take().request.id == "a"
    assert (len(line), line.head()) == (0, None)


def test_what_is_known_of_tenants_that_are_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_line, "MAX_IDLE_TENANTS", 10)
    line = FairLine()
    for number in range(1000):
        line_of(line, [(f"r{number}", f"tenant {number}", 0)])
        seq = line.take()
        line.charge(seq, 5 + number % 3)
        assert len(line._served) <= 12


def test_one_that_is_put_back_has_lost_nothing() -> None:
    line = FairLine()
    line_of(line, [("b", "b", 0), ("b2", "b", 0), ("a", "a", 0)])
    line.charge(line.take(), 100)
    held = line.take()
    assert held.request.id == "a"
    head = line.head()
    assert head is not None
    line.charge(head, 100)
    line_of(line, [("c", "c", 0)])  # a tenant that comes starts higher by now
    line.put_back(held)
    assert [line.take().request.id for _ in range(3)] == ["a", "c", "b2"]
