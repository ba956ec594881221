"""The scheduler against a simulated executor that checks the content of every KV slot it would read."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from octavo.errors import InvalidArgument, PromptTooLong
from octavo.protocol import SequenceResult, StepResult
from scheduling import Programs, Run


def test_one_request_runs_to_its_length() -> None:
    run = Run()
    (seq_id,) = run.add([1, 2, 3, 4, 5], max_tokens=7)
    run.drain()
    run.check()
    assert len(run.tokens[seq_id]) == 7
    assert run.reasons[seq_id] == "length"
    assert [plan.num_tokens for plan in run.plans] == [5, 1, 1, 1, 1, 1, 1]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    run = Run(max_num_batched_tokens=8)
    run.add(list(range(20)), max_tokens=2)
    run.drain()
    run.check()
    assert [plan.num_tokens for plan in run.plans] == [8, 8, 4, 1]
    assert [bool(plan.slices[0].samples) for plan in run.plans] == [False, False, True, True]


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    run = Run(max_num_batched_tokens=8)
    (short,) = run.add([1, 2], max_tokens=10)
    run.step()
    run.add(list(range(30)), max_tokens=1)
    for _ in range(4):
        plan = run.step()
        assert plan is not None
        assert (plan.slices[0].seq_id, plan.slices[0].length) == (short, 1)
        assert plan.num_tokens == 8
    run.drain()
    run.check()


def test_a_long_prompt_ahead_in_rank_leaves_a_token_for_everyone_behind() -> None:
    run = Run(max_num_batched_tokens=8)
    (short,) = run.add([1, 2], priority=1, max_tokens=10)
    run.step()
    run.add(list(range(30)), priority=0, max_tokens=1)
    run.step()
    plan = run.step()
    assert plan is not None
    assert [piece.length for piece in plan.slices] == [7, 1]
    assert plan.slices[1].seq_id == short
    run.drain()
    run.check()


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    run = Run(enable_chunked_prefill=False, max_num_batched_tokens=40)
    run.add(list(range(30)), max_tokens=2)
    run.add(list(range(30, 50)), max_tokens=2)
    run.drain()
    run.check()
    assert [plan.num_tokens for plan in run.plans] == [30, 21, 1]


def test_priority_goes_before_arrival() -> None:
    run = Run(max_num_seqs=1)
    ids = [run.add([i], priority=p, max_tokens=1)[0] for i, p in enumerate([5, 0, 5, -1])]
    run.drain()
    order = [plan.slices[0].seq_id for plan in run.plans]
    assert order == [ids[3], ids[1], ids[0], ids[2]]


def test_a_seat_is_kept_for_every_fork() -> None:
    run = Run(max_num_seqs=4)
    run.add([1, 2, 3], n=3, max_tokens=3)
    run.add([4, 5], n=2, max_tokens=1)
    run.step()
    assert run.scheduler.num_running == 3
    assert run.scheduler.num_waiting == 1
    run.drain()
    run.check()


def test_n_sequences_share_the_prompt_and_copy_only_the_last_block() -> None:
    run = Run(max_num_seqs=8)
    ids = run.add(list(range(10)), n=4, max_tokens=2, seed=3)
    run.step()
    assert run.executor.computed_tokens == 10
    assert run.blocks.num_used_blocks == 3
    run.step()
    assert run.executor.copies == 3  # the last writer keeps the original
    run.drain()
    run.check()
    assert len({tuple(run.tokens[i]) for i in ids}) > 1


def test_a_common_prefix_is_computed_once() -> None:
    run = Run()
    run.add([*range(12), 40], max_tokens=1)
    run.drain()
    run.add([*range(12), 41], max_tokens=1)
    run.drain()
    run.check()
    assert run.executor.computed_tokens == 13 + 1
    assert run.scheduler.counters.prefix_hits == 12
    assert run.scheduler.counters.cached_prompt_tokens == 12


def test_the_newest_is_preempted_and_two_do_not_thrash() -> None:
    run = Run(num_blocks=12, max_num_seqs=2)
    first, second = run.add([1] * 10, max_tokens=30)[0], run.add([2] * 10, max_tokens=30)[0]
    run.drain()
    run.check()
    assert run.scheduler.counters.preemptions == 1
    preempting = next(plan for plan in run.plans if second in plan.finished)
    assert [piece.seq_id for piece in preempting.slices] == [first]


def test_lower_priority_is_preempted_first_even_if_older() -> None:
    run = Run(num_blocks=12, max_num_seqs=2)
    old, urgent = run.add([1] * 10, priority=1, max_tokens=30)[0], run.add([2] * 10, max_tokens=30)[0]
    run.drain()
    run.check()
    preempting = next(plan for plan in run.plans if plan.finished)
    assert preempting.finished == (old,)
    assert [piece.seq_id for piece in preempting.slices] == [urgent]


def test_stop_tokens_and_eos_end_a_sequence_and_ignore_eos_does_not() -> None:
    plain = Run()
    (seq_id,) = plain.add([1, 2, 3], max_tokens=20, seed=1)
    plain.drain()
    eos = plain.tokens[seq_id][4]
    position = plain.tokens[seq_id].index(eos)
    run = Run(eos=(eos,))
    stopped = run.add([1, 2, 3], max_tokens=20, seed=1)[0]
    by_id = run.add([1, 2, 3], max_tokens=20, seed=1, ignore_eos=True, stop_token_ids=(eos,))[0]
    ignored = run.add([1, 2, 3], max_tokens=20, seed=1, ignore_eos=True)[0]
    run.drain()
    for ended in (stopped, by_id):
        assert run.tokens[ended] == plain.tokens[seq_id][: position + 1]
        assert run.reasons[ended] == "stop"
    assert run.tokens[ignored] == plain.tokens[seq_id]


def test_what_can_never_run_is_refused() -> None:
    run = Run(max_num_seqs=4)
    with pytest.raises(PromptTooLong, match=r"40 tokens; max_model_len is 40, so at most 39"):
        run.add([1] * 40)
    with pytest.raises(InvalidArgument, match="empty"):
        run.add([])
    with pytest.raises(InvalidArgument, match=r"'n' is 5; .* at most 4"):
        run.add([1], n=5)
    assert not run.scheduler.has_work


def test_a_prompt_that_fills_the_model_gets_one_token() -> None:
    run = Run(num_blocks=10)
    (seq_id,) = run.add([1] * 39, max_tokens=5)
    run.drain()
    run.check()
    assert len(run.tokens[seq_id]) == 1
    assert run.reasons[seq_id] == "length"


def test_update_ignores_a_sequence_that_was_aborted_while_its_step_was_in_flight() -> None:
    run = Run()
    gone = run.add([1, 2, 3], n=2, max_tokens=5)
    stays = run.add([4, 5, 6], max_tokens=5)[0]
    plan = run.scheduler.schedule()
    assert plan is not None
    run.executor.submit(plan)
    run.scheduler.finish(*gone)
    run.update(plan, run.executor.collect())
    run.drain()
    run.check(stays)
    assert all(run.tokens[seq_id] == [] for seq_id in gone)


def test_a_row_with_an_error_ends_alone() -> None:
    run = Run()
    bad, good = run.add([1, 2], max_tokens=3)[0], run.add([3, 4], max_tokens=3)[0]
    plan = run.scheduler.schedule()
    assert plan is not None
    results = (SequenceResult(bad, error="NaN"), SequenceResult(good, (7,)))
    outputs = run.scheduler.update(plan, StepResult(plan.step_id, results))
    assert [(out.seq_id, out.error) for out in outputs] == [(bad, "NaN"), (good, None)]
    run.scheduler.check_integrity()
    assert run.scheduler.num_running == 1


def test_what_a_row_with_an_error_wrote_is_never_reused() -> None:
    run = Run()
    (bad,) = run.add(list(range(30)), max_tokens=3)
    run.executor.nan_rows.add(bad)
    run.drain()
    assert run.tokens[bad] == []
    (good,) = run.add(list(range(30)), max_tokens=3)
    run.drain()
    run.check(good)
    assert run.scheduler.counters.prefix_hits == 0


def test_an_end_token_before_min_tokens_does_not_end_a_sequence_and_is_masked_for_the_worker() -> None:
    run = Run(eos=(9,))
    (seq_id,) = run.add([1, 2], max_tokens=10, min_tokens=2, stop_token_ids=(4,))
    plan = run.scheduler.schedule()
    assert plan is not None
    assert (plan.new[0].sampling.min_tokens, plan.new[0].sampling.stop_ids) == (2, (4, 9))
    (out,) = run.scheduler.update(plan, StepResult(1, (SequenceResult(seq_id, (5, 6, 9)),)))
    assert (out.token_ids, out.finish_reason) == ((5, 6, 9), "stop")


def test_several_tokens_in_one_result_are_cut_at_the_end_of_the_sequence() -> None:
    run = Run(eos=(9,))
    (seq_id,) = run.add([1, 2], max_tokens=10)
    plan = run.scheduler.schedule()
    assert plan is not None
    (out,) = run.scheduler.update(plan, StepResult(1, (SequenceResult(seq_id, (5, 9, 6)),)))
    assert (out.token_ids, out.finish_reason, out.stopped_by_token) == ((5, 9), "stop", True)
    assert not run.scheduler.has_work


class Machine(Programs):
    """Random programs of arrivals, steps, aborts and failing steps."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 8]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.sampled_from([0, 1, 3, 10, 60]),
        spare_blocks=st.sampled_from([0, 1, 4, 30]),
        num_host_blocks=st.sampled_from([0, 1, 3, 60]),
        has_directory=st.booleans(),
        caching=st.booleans(),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "sjf"]),
    )
    def start(
        self,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        spare_blocks: int,
        num_host_blocks: int,
        has_directory: bool,
        caching: bool,
        chunked: bool,
        policy: str,
    ) -> None:
        length = 24
        self.run = Run(
            num_blocks=-(-length // block_size) + spare_blocks,
            num_host_blocks=num_host_blocks,
            has_directory=has_directory and caching,
            block_size=block_size,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget + (0 if chunked else length),
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=23),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 24),
        priority=st.integers(-1, 1),
        stop=st.sampled_from([(), (3,), (3, 17)]),
    )
    def add(self, prompt: list[int], n: int, max_tokens: int, priority: int, stop: tuple[int, ...]) -> None:
        n = min(n, self.run.config.max_num_seqs)
        self.run.add(prompt, priority, n=n, max_tokens=max_tokens, stop_token_ids=stop)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=1000, stateful_step_count=25, deadline=None)
