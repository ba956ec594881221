"""The engine on a tiny random model: the same tokens as Transformers, however the work is cut up."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import Engine, SamplingParams
from octavo.errors import Cancelled, InvalidArgument, PromptTooLong, StepFailed
from octavo.request import TextDelta
from tiny import EOS
from tiny_engine import continued, preempt_every, tiny_engine, whole

NEW_TOKENS = 24
SHARED = list(range(40, 80))
# Of one token to 99; some share a prefix, two are equal.
PROMPTS = [
    [7],
    [9, 30, 31],
    list(range(5, 22)),
    [*SHARED, 100, 101],
    [*SHARED, 110],
    [*SHARED, 110],
    SHARED[:16],
    [3 + (i * i) % 250 for i in range(99)],
]


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    return continued(reference, PROMPTS, NEW_TOKENS)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with whole(tiny_engine(folder)) as engine:
        yield engine


def is_tie(reference: Any, prompt: list[int], tokens: list[int], expected: list[int]) -> bool:
    """Whether the two best logits of Transformers are equal within 1e-4 where the tokens part."""
    split = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + expected[:split]])).logits[0, -1]
    best = logits.topk(2).values
    return bool(best[0] - best[1] <= 1e-4)


@pytest.mark.parametrize("preempting", [False, True], ids=["", "preempting"])
@pytest.mark.parametrize("budget", [16, 60, 8192])
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_greedy_tokens_are_those_of_transformers_however_the_work_is_cut(
    folder: Path, reference: Any, expected: list[list[int]], block_size: int, budget: int, preempting: bool
) -> None:
    engine = tiny_engine(
        folder,
        block_size=block_size,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=8192 // block_size,
    )
    if preempting:
        preempt_every(engine, 10)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    forked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    params = [forked if index % 3 == 2 else greedy for index in range(len(PROMPTS))]
    ties = 0
    for _ in range(2):  # the second time every prefix is in the cache
        for prompt, tokens, done in zip(PROMPTS, expected, engine.generate(PROMPTS, params), strict=True):
            for output in done.outputs:
                assert output.finish_reason == "length"
                if output.token_ids != tokens:
                    assert is_tie(reference, prompt, output.token_ids, tokens)
                    ties += 1
    assert ties <= 1
    stats = engine.stats()
    assert stats.prefix_hits_total > 0 or block_size == 128
    assert (stats.preemptions_total > 0) == preempting
    assert stats.num_used_blocks == 0
    engine.check_integrity()


def test_too_few_blocks_preempt_and_change_nothing(folder: Path, reference: Any, expected: Any) -> None:
    engine = tiny_engine(folder, block_size=8, max_model_len=128, num_gpu_blocks_override=20)
    done = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    assert [c.outputs[0].token_ids for c in done] == expected
    assert engine.stats().preemptions_total > 0


def test_a_seed_gives_the_same_sample_whatever_else_runs(folder: Path, engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, seed=11, max_tokens=20, n=2)
    alone = engine.generate([PROMPTS[3]], params)[0]
    others = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    crowd = engine.generate(PROMPTS, [others] * 3 + [params] + [others] * 4)[3]
    assert [o.token_ids for o in crowd.outputs] == [o.token_ids for o in alone.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
    preempted = tiny_engine(folder, block_size=4, max_num_batched_tokens=16)
    preempt_every(preempted, 3)
    again = preempted.generate(PROMPTS, [others] * 3 + [params] + [others] * 4)[3]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in alone.outputs]


def test_without_a_seed_samples_differ(engine: Engine) -> None:
    hot = SamplingParams(temperature=2, max_tokens=20)
    a, b = engine.generate([PROMPTS[2], PROMPTS[2]], hot)
    assert a.outputs[0].token_ids != b.outputs[0].token_ids


def test_logprobs_are_those_of_transformers(engine: Engine, reference: Any) -> None:
    prompt = PROMPTS[7]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    output = engine.generate([prompt], params)[0].outputs[0]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    truth = torch.log_softmax(logits.double(), -1)
    total = 0.0
    assert len(output.logprobs) == 5
    for row, token, entries in zip(truth, output.token_ids, output.logprobs, strict=True):
        assert [e.token_id for e in entries] == row.topk(3).indices.tolist()
        assert entries[0].token_id == token
        assert [e.rank for e in entries] == [1, 2, 3]
        for entry in entries:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), rel=1e-4, abs=1e-4)
            assert entry.decoded_token == engine.tokenizer.token_text(entry.token_id)
        total += float(row[token])
    assert output.cumulative_logprob == pytest.approx(total, rel=1e-4)


def test_an_end_token_is_counted_but_has_no_text(engine: Engine) -> None:
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = engine.generate([PROMPTS[2]], free)[0].outputs[0]
    last = plain.token_ids[3]
    first = plain.token_ids.index(last)
    stop = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(last,))
    output = engine.generate([PROMPTS[2]], stop)[0].outputs[0]
    assert output.token_ids == plain.token_ids[: first + 1]
    assert output.finish_reason == "stop"
    assert output.text == engine.tokenizer.decode(plain.token_ids[:first])


def test_a_stop_string_ends_the_sequence_and_frees_its_blocks(engine: Engine) -> None:
    free = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    plain = engine.generate([PROMPTS[3]], free)[0].outputs[0]
    stop = plain.text[6:9]
    cut = plain.text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, stop=(stop,))
    output = engine.generate([PROMPTS[3]], params)[0].outputs[0]
    assert output.text == plain.text[:cut]
    assert output.finish_reason == "stop"
    assert output.token_ids == plain.token_ids[: len(output.token_ids)]
    assert engine.tokenizer.decode(output.token_ids).startswith(plain.text[: cut + len(stop)])


def test_deltas_carry_exactly_the_tokens_of_their_text(engine: Engine) -> None:
    deltas: list[TextDelta] = []
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, stop=("\0never\0",))
    engine.add(engine.make_request("r", PROMPTS[4], params), deltas.append)
    while engine.has_work:
        engine.step()
    assert [delta.request_finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        tokens = [token for delta in mine for token in delta.token_ids]
        assert len(tokens) == 12
        assert "".join(delta.text for delta in mine) == engine.tokenizer.decode(tokens)
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_cancelled_request_ends_with_one_error_and_leaves_the_others(engine: Engine) -> None:
    gone: list[TextDelta] = []
    kept: list[TextDelta] = []
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, n=2)
    engine.add(engine.make_request("gone", PROMPTS[2], params), gone.append)
    engine.add(engine.make_request("kept", PROMPTS[3], params), kept.append)
    for _ in range(3):
        engine.step()
    assert engine.abort("gone")
    assert not engine.abort("gone")
    while engine.has_work:
        engine.step()
    assert isinstance(gone[-1].error, Cancelled)
    assert [delta.request_finished for delta in gone].count(True) == 1
    assert sum(len(delta.token_ids) for delta in kept) == 20
    assert engine.stats().requests_finished == {"abort": 1, "length": 1}


def test_a_failing_step_fails_its_own_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas: list[TextDelta] = []
    others: list[TextDelta] = []
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    before = engine.generate([PROMPTS[3]], greedy)[0].outputs[0].token_ids
    engine.add(engine.make_request("r", PROMPTS[3], greedy), deltas.append)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._executor._runner, "run", lambda *_: 1 / 0)
        engine._scheduler._admission.take = lambda *_: None  # type: ignore[method-assign]
        engine.add(engine.make_request("waits", PROMPTS[3], greedy), others.append)
        engine.step()
    del engine._scheduler._admission.take  # type: ignore[method-assign]
    assert isinstance(deltas[-1].error, StepFailed)
    assert deltas[-1].request_finished
    assert others == []
    while engine.has_work:
        engine.step()
    assert [token for delta in others for token in delta.token_ids] == before
    assert engine.generate([PROMPTS[3]], greedy)[0].outputs[0].token_ids == before


def test_answer_all_answers_everyone_whatever_state_the_scheduler_is_in(folder: Path, reference: Any) -> None:
    broken = tiny_engine(folder)
    deltas: list[TextDelta] = []
    for name in "ab":
        broken.add(broken.make_request(name, PROMPTS[1]), deltas.append)
    broken._scheduler = None  # type: ignore[assignment]
    broken.answer_all(StepFailed("broken"))
    assert [(d.request_id, str(d.error), d.request_finished) for d in deltas] == [
        ("a", "broken", True),
        ("b", "broken", True),
    ]


def test_min_tokens_puts_off_the_end(engine: Engine) -> None:
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    last = engine.generate([PROMPTS[2]], free)[0].outputs[0].token_ids[0]
    stop = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "stop_token_ids": (last,)}
    (at_once,) = engine.generate([PROMPTS[2]], SamplingParams(**stop))
    (later,) = engine.generate([PROMPTS[2]], SamplingParams(**stop, min_tokens=4))
    assert at_once.outputs[0].token_ids == [last]
    assert len(later.outputs[0].token_ids) > 4
    assert last not in later.outputs[0].token_ids[:4]


def test_generate_raises_what_is_wrong_with_a_prompt_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match="300 tokens; max_model_len is 256"):
        engine.generate([[5], [5] * 300])
    with pytest.raises(InvalidArgument, match="empty"):
        engine.generate([""])
    with pytest.raises(InvalidArgument, match=r"'input_ids' holds 320; allowed: 0 to 319"):
        engine.generate([[320]])
    with pytest.raises(InvalidArgument, match=r"'input_ids' holds -1; allowed: 0 to 319"):
        engine.generate([[-1]])
    with pytest.raises(InvalidArgument, match=r"2 prompts, but 1 sampling"):
        engine.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidArgument, match="give a list of prompts"):
        engine.generate("a")
    assert not engine.has_work


def test_a_priority_where_the_policy_knows_none_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.make_request("r", PROMPTS[0], priority=-1).priority == -1
    monkeypatch.setattr(engine, "config", replace(engine.config, scheduling_policy="fcfs"))
    with pytest.raises(InvalidArgument, match="scheduling_policy is 'fcfs', which knows none"):
        engine.make_request("r", PROMPTS[0], priority=-1)
    assert engine.make_request("r", PROMPTS[0]).priority == 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 256 * engine.tokenizer.most_token_bytes
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, _: [5] * len(text))
    with pytest.raises(PromptTooLong, match=f"{most + 1} characters; .* at most {most} characters"):
        engine.make_request("r", "x" * (most + 1))
    with pytest.raises(PromptTooLong, match=f"{most} tokens"):
        engine.make_request("r", "x" * most)


def test_an_interrupt_takes_effect_between_steps_and_leaves_the_engine_usable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    before = engine.generate([PROMPTS[3]], greedy)[0].outputs[0].token_ids
    run = engine._executor._runner.run

    def interrupted_run(inputs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return run(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(engine._executor._runner, "run", interrupted_run)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, greedy)
    engine.check_integrity()
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert engine.generate([PROMPTS[3]], greedy)[0].outputs[0].token_ids == before


def test_text_in_text_out(engine: Engine) -> None:
    (done,) = engine.generate(
        ["the thin thing"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    assert done.prompt_token_ids == tuple(engine.tokenizer.encode("the thin thing"))
    assert done.text == engine.tokenizer.decode(done.outputs[0].token_ids)


def test_the_end_of_sequence_token_comes_from_the_generation_config(engine: Engine) -> None:
    assert engine._scheduler._reception._eos == {EOS}


def test_one_line_says_what_fits(engine: Engine) -> None:
    assert engine.describe() == (
        "KV cache: 512 blocks of 16 = 8192 tokens = 32.0 requests at max_model_len (256); "
        "limited by num_gpu_blocks_override = 512"
    )
