"""Beam search: by its definition, on a simulated executor that checks every KV slot; and as Transformers'."""

import itertools
import random
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from octavo import SamplingParams
from octavo.engine.draft import Draft
from octavo.errors import Cancelled, InvalidArgument, StepFailed
from octavo.protocol import StepResult
from octavo.request import TextDelta
from octavo.serving import codec
from scheduling import Programs, Run
from tiny import EOS
from tiny_engine import tiny_engine

PROMPT = [4, 1, 7, 7, 2]
STOPS = (3, 17, 20, 31)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 2.0])
@pytest.mark.parametrize(("beam_width", "n"), [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_it_finds_what_the_definition_finds(
    beam_width: int, n: int, length_penalty: float, early_stopping: bool
) -> None:
    run = Run()
    for min_tokens, stops in ((0, STOPS), (4, STOPS), (0, ())):
        search = {"n": n, "length_penalty": length_penalty, "early_stopping": early_stopping}
        run.add(
            PROMPT,
            use_beam_search=True,
            beam_width=beam_width,
            max_tokens=9,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            **search,
        )
        run.drain()
    run.check()


def test_the_width_is_that_of_best_of_or_n_where_none_is_given() -> None:
    run = Run()
    assert len(run.add(PROMPT, use_beam_search=True, n=3, max_tokens=4)) == 3
    assert len(run.add(PROMPT, use_beam_search=True, n=2, best_of=4, max_tokens=4)) == 4
    run.drain()
    run.check()


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    run = Run(num_blocks=120, block_size=2, max_model_len=80, max_num_batched_tokens=64)
    ids = run.add(list(range(40)), use_beam_search=True, beam_width=4, max_tokens=20)
    run.drain()
    run.check()
    blocks_of_one = 60 // 2
    assert run.most_blocks < 2 * blocks_of_one < len(ids) * blocks_of_one


@pytest.mark.parametrize("caching", [False, True])
def test_a_search_that_is_preempted_goes_on_as_if_nothing_had_happened(caching: bool) -> None:
    # Those that go first outgrow what the three beams leave to them.
    run = Run(num_blocks=28, max_num_batched_tokens=9, enable_prefix_caching=caching)
    for first in range(4):
        run.add([first] * 6, priority=-1, max_tokens=30)
    run.add(PROMPT * 3, use_beam_search=True, beam_width=3, n=3, max_tokens=20)
    run.drain()
    run.check()
    assert run.scheduler.counters.preemptions > 0


def test_all_beams_are_preempted_and_resume_together() -> None:
    run = Run()
    ids = run.add(PROMPT * 4, use_beam_search=True, beam_width=3, n=3, max_tokens=6)
    for _ in range(3):
        run.step()
    assert run.scheduler.num_running == 3
    run.scheduler._preempt_last(Draft(0, run.blocks))
    run.scheduler.check_integrity()
    assert run.blocks.num_used_blocks == 0
    assert run.scheduler.num_waiting == 1  # the first stands for all
    plan = run.step()
    assert plan is not None
    assert [new.seq_id for new in plan.new] == ids
    run.drain()
    run.check()


def test_a_beam_that_resumed_sooner_waits_for_the_others() -> None:
    run = Run(max_num_batched_tokens=10, enable_prefix_caching=False)
    run.add(PROMPT * 4, use_beam_search=True, beam_width=3, n=3, max_tokens=6, stop_token_ids=STOPS)
    for _ in range(4):
        run.step()
    run.scheduler._preempt_last(Draft(0, run.blocks))
    lengths = []
    for _ in range(7):
        plan = run.step()
        assert plan is not None
        lengths.append([piece.length for piece in plan.slices])
    assert [len(pieces) for pieces in lengths][:2] == [3, 3]
    assert any(len(pieces) < 3 for pieces in lengths), "nobody had to wait"
    run.drain()
    run.check()


def test_searches_and_samples_run_side_by_side() -> None:
    run = Run(num_blocks=120, max_num_seqs=16)
    for index in range(4):
        run.add(
            [index, 5, 6], use_beam_search=True, beam_width=2 + index % 3, max_tokens=8, stop_token_ids=STOPS
        )
        run.add([index, 5, 6], n=2, seed=index, max_tokens=8)
    run.drain()
    run.check()


def test_a_search_that_is_aborted_in_flight_leaves_nothing() -> None:
    run = Run()
    gone = run.add(PROMPT, use_beam_search=True, beam_width=4, max_tokens=9)
    run.add(PROMPT, max_tokens=9)
    for _ in range(3):
        run.step()
    plan = run.scheduler.schedule()
    assert plan is not None
    run.executor.submit(plan)
    run.scheduler.finish(*gone)
    run.update(plan, run.executor.collect())
    run.drain()
    run.check(aborted=gone)
    assert not any(run.tokens[seq_id] for seq_id in gone)


def test_an_unusable_row_ends_the_whole_search_and_only_it() -> None:
    run = Run()
    bad = run.add(PROMPT, use_beam_search=True, beam_width=3, max_tokens=9)
    run.add([1, 2], max_tokens=9)
    run.step()
    run.executor.nan_rows.add(bad[1])
    run.step()
    assert [run.ends[seq_id] for seq_id in bad] == [0, 1, 0]
    assert run.scheduler.num_running == 1
    run.drain()
    run.check(aborted=bad)


def test_a_search_that_might_never_fit_is_refused() -> None:
    run = Run(num_blocks=20, max_num_seqs=4)
    search = {"use_beam_search": True, "beam_width": 4}
    with pytest.raises(
        InvalidArgument, match=r"may need 24 KV blocks; this server has 20: lower 'beam_width'"
    ):
        run.add([1] * 11, max_tokens=10, **search)
    run.add([1] * 10, max_tokens=10, **search)
    with pytest.raises(InvalidArgument, match=r"'beam_width' is 5; this server runs at most 4"):
        run.add([1], max_tokens=1, **{**search, "beam_width": 5})
    run.drain()


class Machine(Programs):
    """Random programs of searches, samples, steps, aborts and failing steps, with few blocks."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 8]),
        max_num_seqs=st.integers(3, 6),
        extra_budget=st.sampled_from([0, 1, 3, 10, 60]),
        sequences_of_blocks=st.integers(1, 4),
        spare_blocks=st.sampled_from([0, 1, 4]),
        num_host_blocks=st.sampled_from([0, 1, 3, 60]),
        caching=st.booleans(),
        chunked=st.booleans(),
        fair=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        sequences_of_blocks: int,
        spare_blocks: int,
        num_host_blocks: int,
        caching: bool,
        chunked: bool,
        fair: bool,
    ) -> None:
        length = 20
        self.run = Run(
            num_blocks=sequences_of_blocks * -(-length // block_size) + spare_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget + (0 if chunked else length),
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            fair_scheduling=fair,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        width=st.integers(1, 4),
        max_tokens=st.integers(1, 10),
        priority=st.integers(-1, 1),
        length_penalty=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from([(), (3,), STOPS]),
        searches=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        width: int,
        max_tokens: int,
        priority: int,
        length_penalty: float,
        stop: tuple[int, ...],
        searches: bool,
    ) -> None:
        common = {"max_tokens": max_tokens, "stop_token_ids": stop}
        if not searches:
            self.run.add(prompt, priority, n=min(width, self.run.config.max_num_seqs), **common)
            return
        search = {"use_beam_search": True, "beam_width": width, "length_penalty": length_penalty}
        with suppress(InvalidArgument):  # one that might not fit
            self.run.add(prompt, priority, n=1 + width // 2, **search, **common)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


def test_contradictory_parameters_are_refused() -> None:
    search = {"use_beam_search": True, "beam_width": 3}
    for values, message in (
        ({"use_beam_search": True}, "needs a width: set 'beam_width', or 'best_of' or 'n'"),
        ({"beam_width": 2}, "set 'use_beam_search' to true"),
        ({"length_penalty": 0.5}, "set 'use_beam_search' to true"),
        ({"early_stopping": True}, "set 'use_beam_search' to true"),
        ({**search, "beam_width": 0}, "'beam_width' is 0; allowed: 1 to 128"),
        ({**search, "n": 4}, "'n' is 4, but 'beam_width' is 3"),
        ({**search, "best_of": 4}, "'beam_width' is 3, but 'best_of' is 4"),
        ({**search, "length_penalty": float("nan")}, "'length_penalty' is nan; allowed: -10 to 10"),
        ({**search, "early_stopping": "never"}, "'early_stopping' is 'never'; expected true or false"),
        ({**search, "temperature": 0.5}, "'temperature' is 0.5"),
        ({**search, "top_k": 5}, "'top_k' is 5"),
        ({**search, "top_p": 0.5}, "'top_p' cannot be combined"),
        ({**search, "stop": "x"}, "'stop' cannot be combined"),
        ({**search, "prompt_logprobs": 1}, "'prompt_logprobs' cannot be combined"),
        ({**search, "presence_penalty": 1}, "'presence_penalty' cannot be combined"),
        ({**search, "logit_bias": {"5": 1}}, "'logit_bias' cannot be combined"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            SamplingParams.parse(values)
    harmless = {"temperature": "0", "top_k": -1, "seed": 5, "length_penalty": "2", "use_beam_search": "true"}
    params = SamplingParams.parse({**harmless, "n": 2})
    assert (params.num_sequences, params.length_penalty) == (2, 2.0)
    assert SamplingParams.parse({"use_beam_search": False, "beam_width": 1}).num_sequences == 1


def test_a_search_cannot_be_streamed() -> None:
    inputs = {
        "text_input": np.array([b"x"], np.object_),
        "stream": np.array([True]),
        "sampling_parameters": np.array([b'{"use_beam_search": true, "beam_width": 2}'], np.object_),
    }
    with pytest.raises(InvalidArgument, match="answers once, when it is done; set 'stream' to false"):
        codec.parse(inputs)
    inputs["stream"][:] = False
    call = codec.parse(inputs)
    assert isinstance(call, codec.Generate)
    assert call.params.num_sequences == 2


# Below: a model. Sixteen prompts of one token to 99; some share a prefix.
PROMPTS = [
    [7],
    [9, 30, 31],
    *([*range(40, 40 + 5 * i), 100 + i] for i in range(1, 13)),
    list(range(5, 22)),
    [3 + (i * i) % 250 for i in range(99)],
]
ENDS = (EOS, *range(60, 320, 20))
NEW_TOKENS = 16


build = partial(tiny_engine, max_num_seqs=32)


def beams_of_transformers(
    reference: Any, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """Their tokens, the one that ended each included, and their scores."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.num_sequences,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[len(prompt) :].tolist() for row in out.sequences]
    lengths = [
        next((i for i, token in enumerate(tokens, 1) if token in params.stop_token_ids), len(tokens))
        for tokens in sequences
    ]
    cut = [tokens[:length] for tokens, length in zip(sequences, lengths, strict=True)]
    return cut, out.sequences_scores.tolist()


def search_params(**values: Any) -> SamplingParams:
    common = {"use_beam_search": True, "ignore_eos": True, "stop_token_ids": ENDS, "max_tokens": NEW_TOKENS}
    return SamplingParams(**{**common, **values})


@pytest.mark.parametrize(
    "params",
    [
        search_params(beam_width=4, n=4, logprobs=0),
        search_params(beam_width=3, n=1, length_penalty=0.0, logprobs=0),
        search_params(beam_width=2, n=2, length_penalty=2.0, min_tokens=3, logprobs=0),
        search_params(beam_width=5, n=2, length_penalty=-0.5, early_stopping=True, logprobs=0),
        search_params(beam_width=4, n=3, stop_token_ids=(), logprobs=0),
    ],
    ids=lambda params: f"{params.num_sequences}-{params.length_penalty}",
)
def test_it_finds_what_transformers_finds(folder: Path, reference: Any, params: SamplingParams) -> None:
    """Where the tokens differ, the scores must be those of a tie, and that is rare."""
    engine = build(folder)
    done = engine.generate(PROMPTS, params)
    ties = 0
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected, scores = beams_of_transformers(reference, prompt, params)
        for output, tokens, score in zip(completion.outputs, expected, scores, strict=True):
            own = output.cumulative_logprob / len(output.token_ids) ** params.length_penalty
            assert own == pytest.approx(score, abs=1e-4)
            assert output.finish_reason == ("stop" if tokens[-1] in params.stop_token_ids else "length")
            ties += output.token_ids != tokens
    assert ties <= 1
    assert engine.stats().num_used_blocks == 0
    engine.check_integrity()


def test_it_finds_the_same_however_the_work_is_cut(folder: Path, reference: Any) -> None:
    params = search_params(beam_width=4, n=4)
    whole = [[o.token_ids for o in c.outputs] for c in build(folder).generate(PROMPTS, params)]
    settings = {"block_size": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 117}
    engine = build(folder, **settings, max_model_len=128)
    others = SamplingParams(temperature=0, max_tokens=2 * NEW_TOKENS, ignore_eos=True)
    mixed = engine.generate([*PROMPTS, *PROMPTS], [others] * len(PROMPTS) + [params] * len(PROMPTS))
    assert [[o.token_ids for o in c.outputs] for c in mixed[len(PROMPTS) :]] == whole
    assert engine.stats().preemptions_total > 0
    engine.check_integrity()


def test_log_probabilities_are_those_of_the_model(folder: Path, reference: Any) -> None:
    engine = build(folder)
    prompt = PROMPTS[4]
    (completion,) = engine.generate([prompt], search_params(beam_width=3, n=3, logprobs=2, max_tokens=6))
    ranks = set()
    for output in completion.outputs:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]
        assert output.cumulative_logprob == pytest.approx(float(chosen.sum()), abs=1e-4)
        for row, token, entries in zip(logprobs, output.token_ids, output.logprobs, strict=True):
            best = row.topk(2).indices.tolist()
            assert [entry.token_id for entry in entries] == [token, *(b for b in best if b != token)]
            for entry in entries:
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            ranks.add(entries[0].rank)
    assert len(ranks) > 1, "every token was the best one: nothing was searched"


def test_each_search_ends_in_one_final_delta_whatever_happens(folder: Path, reference: Any) -> None:
    chance = random.Random(0)
    engine = build(
        folder, block_size=4, max_model_len=64, num_gpu_blocks_override=54, max_num_batched_tokens=40
    )
    collect, deltas = engine._executor.collect, defaultdict[str, list[TextDelta]](list)
    failing = itertools.cycle([False] * 40 + [True])

    def collect_or_fail() -> StepResult:
        result = collect()
        if next(failing):
            raise StepFailed("made to fail")
        return result

    engine._executor.collect = collect_or_fail  # type: ignore[method-assign]
    for number in range(60):
        width = chance.randint(2, 4)
        searches = search_params(
            beam_width=width, n=chance.randint(1, width), max_tokens=chance.randint(1, 20)
        )
        samples = SamplingParams(n=2, max_tokens=12)
        prompt = [chance.randint(3, 300) for _ in range(chance.randint(1, 30))]
        params = searches if number % 3 else samples
        request = engine.make_request(f"{number}", prompt, params)
        engine.add(request, lambda delta: deltas[delta.request_id].append(delta))
        for _ in range(chance.randint(0, 6)):
            engine.step()
            engine.check_integrity()
        if chance.random() < 0.2:
            engine.abort(f"{chance.randint(0, number)}")
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().preemptions_total > 0
    errors = Counter[type]()
    for number in range(60):
        news = deltas[f"{number}"]
        assert [delta.request_finished for delta in news] == [False] * (len(news) - 1) + [True]
        errors[type(news[-1].error)] += 1
        if number % 3 and not news[-1].error:
            assert [delta.index for delta in news] == list(range(len(news)))
    assert set(errors) == {type(None), Cancelled, StepFailed}
    engine.close()
