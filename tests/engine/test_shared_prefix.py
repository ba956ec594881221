"""Prompts with a common prefix: it is computed once, whoever comes when, and kept for the next."""

from random import Random

import pytest

from octavo.errors import StepFailed
from octavo.protocol import StepPlan
from octavo.request import PoolingParams, Request, SamplingParams
from scheduling import Run
from simulated import VOCAB

SIZE = 16
SYSTEM = [Random(0).randrange(VOCAB) for _ in range(32 * SIZE)]


def questions(count: int) -> list[list[int]]:
    source = Random(1)
    return [
        [number % VOCAB, *(source.randrange(VOCAB) for _ in range(9 + number % 9))] for number in range(count)
    ]


def big_run(**config: object) -> Run:
    arguments: dict[str, object] = {"num_blocks": 600, "block_size": SIZE, "max_model_len": 1024}
    return Run(**{**arguments, "max_num_seqs": 128, "max_num_batched_tokens": 2048, **config})


def computed(run: Run) -> int:
    return sum(plan.num_tokens for plan in run.plans)


def ids_of(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [piece.seq_id for piece in plan.slices]


def test_a_hundred_that_come_at_once_compute_their_prefix_once() -> None:
    run = big_run()
    asked = questions(100)
    for question in asked:
        run.add(SYSTEM + question, max_tokens=1)
    run.drain()
    run.check()
    assert computed(run) == len(SYSTEM) + sum(map(len, asked))
    assert [len(plan.slices) for plan in run.plans] == [1, 99]
    counters = run.scheduler.counters
    assert counters.prefix_hits == counters.cached_prompt_tokens == 99 * len(SYSTEM)
    assert counters.prefix_queries == counters.prompt_tokens == 100 * len(SYSTEM) + sum(map(len, asked))


def test_a_prefix_that_takes_many_steps_is_computed_once_too() -> None:
    run = big_run(max_num_batched_tokens=128)
    asked = questions(40)
    for question in asked:
        run.add(SYSTEM + question, max_tokens=3)
    run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (1, 39)
    run.drain()
    run.check()
    assert run.executor.computed_tokens == len(SYSTEM) + sum(map(len, asked)) + 2 * len(asked)


def test_without_prefix_caching_nobody_waits_for_a_prefix() -> None:
    run = big_run(enable_prefix_caching=False, num_blocks=1000)
    asked = questions(8)
    for question in asked:
        run.add(SYSTEM + question, max_tokens=1)
    assert len(ids_of(run.step())) == 4  # as many as the budget has tokens for
    run.drain()
    assert computed(run) == 8 * len(SYSTEM) + sum(map(len, asked))


def test_salts_have_a_prefix_each_and_do_not_wait_for_each_other() -> None:
    run = big_run()
    asked = questions(20)
    for number, question in enumerate(asked):
        run.add(SYSTEM + question, cache_salt=(None, "a")[number % 2], max_tokens=1)
    assert ids_of(run.step()) == [1, 2]
    run.drain()
    run.check()
    assert computed(run) == 2 * len(SYSTEM) + sum(map(len, asked))


def test_those_behind_pass_one_that_waits_and_not_more_than_there_are_seats() -> None:
    run = big_run(max_num_seqs=3)
    (first,) = run.add([*SYSTEM, 1], max_tokens=2)
    run.add([*SYSTEM, 2], max_tokens=2)
    (other,) = run.add([7] * 20, max_tokens=2)
    assert ids_of(run.step()) == [first, other]
    run.drain()
    crowd = big_run(max_num_seqs=3)
    for number in range(5):
        crowd.add([*SYSTEM, number], max_tokens=2)
    crowd.add([7] * 20, max_tokens=2)
    assert ids_of(crowd.step()) == [1]
    assert ids_of(crowd.step()) == [1, 2, 3]
    crowd.drain()
    crowd.check()


def test_one_that_is_aborted_while_it_is_held_back_never_starts() -> None:
    run = big_run()
    ids = [run.add([*SYSTEM, number], max_tokens=3)[0] for number in range(4)]
    assert ids_of(run.step()) == ids[:1]
    run.scheduler.finish(ids[2])
    assert run.scheduler.num_waiting == 2
    assert ids_of(run.step()) == [ids[0], ids[1], ids[3]]
    run.drain()
    run.check(aborted=ids[2:3])


def test_who_needs_its_whole_prompt_computed_does_not_wait_but_is_waited_for() -> None:
    run = big_run()
    (first,) = run.add([*SYSTEM, 1], max_tokens=1)
    (asks_for_all,) = run.add([*SYSTEM, 2], prompt_logprobs=0, max_tokens=1)
    mean = run.scheduler.add(Request("m", (*SYSTEM, 3), SamplingParams(), embed=PoolingParams("mean")))
    run.add([*SYSTEM, 4], max_tokens=1)
    plan = run.scheduler.schedule()
    assert ids_of(plan) == [first, asks_for_all, mean[0].id]
    run.scheduler.finish(first, asks_for_all, mean[0].id)
    run.scheduler.check_integrity()


@pytest.mark.parametrize("in_flight", [False, True])
def test_when_the_first_is_aborted_the_next_computes_the_rest(in_flight: bool) -> None:
    run = big_run(max_num_batched_tokens=128)
    asked = questions(10)
    first, *others = [run.add(SYSTEM + question, max_tokens=1)[0] for question in asked]
    run.step()
    plan = run.scheduler.schedule() if in_flight else None
    if plan is not None:
        run.executor.submit(plan)
    run.scheduler.finish(first)
    if plan is not None:
        run.update(plan, run.executor.collect())
    assert ids_of(run.step()) == others[:1]
    run.drain()
    run.check(*others)
    lost = 128 if in_flight else 0
    assert run.executor.computed_tokens == len(SYSTEM) + lost + sum(map(len, asked[1:]))


def test_when_the_first_fails_the_next_computes_all() -> None:
    run = big_run()
    asked = questions(10)
    first, *others = [run.add(SYSTEM + question, max_tokens=1)[0] for question in asked]
    plan = run.scheduler.schedule()
    assert ids_of(plan) == [first]
    assert plan is not None
    run.executor.fail_next = True
    with pytest.raises(StepFailed):
        run.executor.submit(plan)
    run.scheduler.finish(first)
    run.drain()
    run.check(*others)
    assert computed(run) == len(SYSTEM) + sum(map(len, asked[1:]))


def test_when_the_first_gets_nan_the_next_computes_all() -> None:
    run = big_run()
    asked = questions(10)
    first, *others = [run.add(SYSTEM + question, max_tokens=1)[0] for question in asked]
    run.executor.nan_rows.add(first)
    run.drain()
    run.check(*others)
    assert computed(run) == 2 * len(SYSTEM) + sum(map(len, asked))


def test_when_the_first_is_preempted_it_is_still_the_first_and_is_waited_for_again() -> None:
    run = Run(num_blocks=14, block_size=4, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=3)
    (old,) = run.add([1] * 4, max_tokens=30)
    for _ in range(2):
        run.step()
    prefix = SYSTEM[:36]
    (first,) = run.add([*prefix, 1, 2, 3], max_tokens=2)
    (second,) = run.add([*prefix, 4, 5, 6], max_tokens=2)
    preempted = False
    while run.scheduler.num_waiting:
        started = {new.seq_id for plan in run.plans for new in plan.new}
        assert second not in started
        plan = run.step()
        assert plan is not None
        preempted |= first in plan.finished and not run.ends[first]
    assert preempted
    assert run.scheduler.counters.prefix_hits > 36  # the first its own blocks, the second the first's
    assert old not in {new.seq_id for plan in run.plans[1:] for new in plan.new}
    run.drain()
    run.check()


def test_a_system_prompt_outlives_the_chats_that_hang_on_it() -> None:
    """Room for the prompt and two chats: a hundred come one after the other, and each evicts an older one."""
    run = big_run(num_blocks=32 + 2 * 4 + 2, max_num_seqs=1)
    asked = questions(100)
    for question in asked:
        run.add(SYSTEM + question + question, max_tokens=20)
        run.drain()
    run.check()
    assert computed(run) == len(SYSTEM) + sum(2 * len(question) + 19 for question in asked)
    assert run.scheduler.counters.cached_prompt_tokens == 99 * len(SYSTEM)


def test_a_chat_reuses_its_history_with_the_answers_in_it() -> None:
    run = big_run(num_blocks=200)
    history: list[int] = []
    for turn, question in enumerate(questions(8)):
        known = max(len(history) - 1, 0) // SIZE * SIZE  # the last token of an answer is not computed
        before = run.scheduler.counters.cached_prompt_tokens
        (seq_id,) = run.add(history + question, max_tokens=25 + turn)
        run.drain()
        run.check(seq_id)
        assert run.scheduler.counters.cached_prompt_tokens - before == known
        history += question + run.tokens[seq_id]
    assert len(history) > 300


def test_the_least_recently_used_of_two_chats_is_evicted_from_its_end() -> None:
    run = big_run(num_blocks=20, max_num_seqs=1)
    old, recent = [1] * 8 * SIZE, [2] * 8 * SIZE
    for prompt in (old, recent, [3] * 8 * SIZE):  # the last takes four blocks of the old one's
        run.add([*prompt, 4], max_tokens=1)
        run.drain()

    def hits(prompt: list[int]) -> int:
        before = run.scheduler.counters.cached_prompt_tokens
        run.add([*prompt, 5], max_tokens=1)
        run.drain()
        return run.scheduler.counters.cached_prompt_tokens - before

    assert hits(recent) == 8 * SIZE
    assert hits(old) == 3 * SIZE
