"""Scheduling policies: who goes before whom, and that nobody starves under any of them."""

from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.policy import PASSED_PER_TOKEN, check_priority, precedence
from octavo.errors import InvalidArgument
from scheduling import Run


def order(run: Run) -> list[int]:
    """The sequences by their first step, once all are done."""
    run.drain()
    run.check()
    return [new.seq_id for plan in run.plans for new in plan.new]


def one_at_a_time(policy: str, **config: object) -> tuple[Run, list[int]]:
    """A short request runs; a long one, a middling one and a short one wait, with ever less priority."""
    arguments = {"max_num_seqs": 1, "scheduling_policy": policy, "max_model_len": 60, "num_blocks": 30}
    run = Run(**{**arguments, **config})
    run.add([9, 9], max_tokens=2)
    run.step()
    return run, [run.add([t] * n, priority=-t, max_tokens=2)[0] for t, n in ((1, 30), (2, 10), (3, 2))]


def test_fcfs_goes_by_arrival_alone() -> None:
    run, (long, middling, short) = one_at_a_time("fcfs")
    assert order(run)[1:] == [long, middling, short]


def test_priority_goes_before_arrival() -> None:
    run, (long, middling, short) = one_at_a_time("priority")
    assert order(run)[1:] == [short, middling, long]


def test_sjf_goes_by_what_is_left_to_compute() -> None:
    run, (long, middling, short) = one_at_a_time("sjf")
    assert order(run)[1:] == [short, middling, long]


def test_sjf_counts_what_the_cache_holds_as_done() -> None:
    run = Run(max_num_seqs=1, scheduling_policy="sjf")
    run.add([1] * 30, max_tokens=1)
    run.drain()
    run.add([9, 9], max_tokens=2)
    run.step()
    middling = run.add([2] * 10, max_tokens=1)[0]
    chat = run.add([1] * 31, max_tokens=1)[0]
    assert order(run)[-2:] == [chat, middling]


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_priority_that_nothing_would_come_of_is_refused(policy: str) -> None:
    with pytest.raises(InvalidArgument, match=f"priority is -1, but scheduling_policy is '{policy}'"):
        check_priority(policy, -1)
    check_priority(policy, 0)
    check_priority("priority", -1)


def test_under_sjf_a_request_is_passed_until_so_many_tokens_were_computed() -> None:
    limit = PASSED_PER_TOKEN * (30 - 2)  # tokens by which a prompt of 2 may come later than one of 30
    first = precedence("sjf", 0, 30, 1000)
    assert precedence("sjf", 0, 2, 1000 + limit - 1) < first
    assert precedence("sjf", 0, 2, 1000 + limit) == first  # and then it is the arrival that counts


def times_to_first_token(policy: str, seed: int) -> list[float]:
    """Of a queue that computes one prompt after the other and is idle a twentieth of the time."""
    source = Random(seed)
    sizes = [min(8000, max(16, int(source.lognormvariate(5.5, 1.2)))) for _ in range(4000)]
    rate = 0.95 * len(sizes) / sum(sizes)
    arrivals = list(accumulate(source.expovariate(rate) for _ in sizes))
    waiting: list[tuple[int, int]] = []
    times, now, computed, come = [], 0.0, 0, 0
    while len(times) < len(sizes):
        now = max(now, arrivals[come]) if not waiting else now
        while come < len(sizes) and arrivals[come] <= now:
            heappush(waiting, (precedence(policy, 0, sizes[come], computed), come))
            come += 1
        _, served = heappop(waiting)
        now += sizes[served]
        computed += sizes[served]
        times.append(now - arrivals[served])
    return times


def test_sjf_shortens_the_mean_wait_at_the_cost_of_the_longest() -> None:
    means, longest = [], []
    for seed in range(16):
        plain, shortest = times_to_first_token("fcfs", seed), times_to_first_token("sjf", seed)
        means.append(mean(shortest) / mean(plain))
        longest.append(max(shortest) / max(plain))
    assert 0.3 < median(means) < 0.4
    assert 2.5 < median(longest) < 3.5


POLICIES = [("fcfs", False), ("priority", False), ("sjf", False)]
POLICIES += [(policy, True) for policy, _ in POLICIES]


@pytest.mark.parametrize(("policy", "fair"), POLICIES)
@given(seed=st.integers(0, 2**32), spare_blocks=st.integers(0, 12), victim_tokens=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_nobody_starves_however_many_come_after(
    policy: str, fair: bool, seed: int, spare_blocks: int, victim_tokens: int
) -> None:
    """More come in each step than can be served, many with a prefix in common, and some are aborted; where
    shares are fair, from other tenants, known ones and new ones, with more priority."""
    source = Random(seed)
    run = Run(
        num_blocks=6 + spare_blocks,
        max_model_len=24,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        scheduling_policy=policy,
        fair_scheduling=fair,
    )
    aborted: set[int] = set()

    def flood() -> None:
        for number in range(3):
            tenant = source.choice(["a", "b", f"{len(run.requests)}"]) if fair else None
            prompt = [0] * source.randrange(9) + [source.randrange(1, 3)]
            priority = source.randrange(-1, 1) if fair else 0
            ids = run.add(prompt, priority, tenant=tenant, max_tokens=source.randrange(2, 6))
            if number == 2 and source.random() < 0.3:
                run.scheduler.finish(*ids)
                aborted.update(ids)

    for _ in range(5):
        flood()
        run.step()
    (victim,) = run.add([0] * victim_tokens + [3], tenant="v" if fair else None, max_tokens=8)
    for _ in range(600):
        if run.ends[victim]:
            break
        flood()
        run.step()
    assert run.scheduler.num_waiting > 3, "the flood was none"
    run.check(victim)
