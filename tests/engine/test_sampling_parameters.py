"""Every parameter that edits logits or asks about them, by its effect on a tiny model."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import Engine, SamplingParams
from octavo.engine.offline import Completion
from octavo.errors import InvalidArgument
from octavo.request import TextDelta
from tiny import EOS, FIRST_BYTE
from tiny_engine import continued, preempt_every, tiny_engine, whole

NEW_TOKENS = 20
SHARED = list(range(40, 80))
PROMPTS = [
    [7],
    [9, 30, 31, 30],
    [*SHARED, 100, 101],
    [*SHARED, 110],
    [3 + (i * i) % 250 for i in range(99)],
]
LETTERS = tuple(range(FIRST_BYTE + ord("a") - ord("!"), FIRST_BYTE + ord("z") - ord("!") + 1))
THE = FIRST_BYTE + 256 + 1  # "the", as a word that begins a text

Edit = Callable[[Tensor, list[int], list[int]], None]  # changes logits [V], given prompt and output


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with whole(tiny_engine(folder)) as engine:
        yield engine


@pytest.fixture
def hard_pressed(folder: Path) -> Iterator[Engine]:
    """Cuts the work into small pieces and throws the last in rank out before every tenth step."""
    with whole(tiny_engine(folder, block_size=4, max_num_batched_tokens=16)) as engine:
        preempt_every(engine, 10)
        yield engine


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **values})


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.outputs[0].token_ids for completion in completions]


def by_hand(reference: Any, edit: Edit, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Greedy continuations by Transformers' logits, edited as told."""
    outputs = []
    for prompt in prompts:
        output: list[int] = []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + output])).logits[0, -1].double()
            edit(logits, prompt, output)
            output.append(int(logits.argmax()))
        outputs.append(output)
    return outputs


def test_the_repetition_penalty_is_that_of_transformers(
    engine: Engine, hard_pressed: Engine, reference: Any
) -> None:
    expected = continued(reference, PROMPTS, NEW_TOKENS, repetition_penalty=1.4)
    params = greedy(repetition_penalty=1.4)
    assert tokens(engine.generate(PROMPTS, params)) == expected
    assert tokens(hard_pressed.generate(PROMPTS, params)) == expected
    assert hard_pressed.stats().preemptions_total > 0
    assert tokens(engine.generate(PROMPTS, greedy())) != expected


def test_presence_and_frequency_penalties(engine: Engine, hard_pressed: Engine, reference: Any) -> None:
    def penalise(logits: Tensor, prompt: list[int], output: list[int]) -> None:
        for token, count in Counter(output).items():
            logits[token] -= 0.8 * count + 1.6

    expected = by_hand(reference, penalise)
    params = greedy(frequency_penalty=0.8, presence_penalty=1.6)
    assert tokens(engine.generate(PROMPTS, params)) == expected
    assert tokens(hard_pressed.generate(PROMPTS, params)) == expected
    assert tokens(engine.generate(PROMPTS, greedy())) != expected


def test_a_bias_favours_and_rules_out_tokens(engine: Engine, reference: Any) -> None:
    plain = tokens(engine.generate(PROMPTS, greedy()))
    banned = Counter(itertools.chain.from_iterable(plain)).most_common(1)[0][0]

    def edit(logits: Tensor, prompt: list[int], output: list[int]) -> None:
        logits[banned] -= 100
        logits[17] += 2.5

    result = tokens(engine.generate(PROMPTS, greedy(logit_bias={str(banned): -100, "17": 2.5})))
    assert result == by_hand(reference, edit)
    assert all(banned not in output for output in result)
    assert any(17 in output for output in result)
    (only,) = tokens(engine.generate([PROMPTS[0]], greedy(logit_bias={25: 100})))
    assert only == [25] * NEW_TOKENS


def test_only_allowed_tokens_are_generated(engine: Engine, reference: Any) -> None:
    def edit(logits: Tensor, prompt: list[int], output: list[int]) -> None:
        kept = logits[list(LETTERS)]
        logits.fill_(-torch.inf)
        logits[list(LETTERS)] = kept

    result = engine.generate(PROMPTS, greedy(allowed_token_ids=LETTERS))
    assert tokens(result) == by_hand(reference, edit)
    assert all(c.text.isalpha() and c.text.islower() for c in result)
    hot = SamplingParams(temperature=5, max_tokens=60, allowed_token_ids=LETTERS, seed=1)
    (drawn,) = engine.generate([PROMPTS[0]], hot)
    assert set(drawn.outputs[0].token_ids) <= set(LETTERS)
    assert len(set(drawn.outputs[0].token_ids)) > 8


def test_bad_words_are_not_said(engine: Engine, hard_pressed: Engine, reference: Any) -> None:
    letters = greedy(allowed_token_ids=LETTERS)
    plain = [completion.text for completion in engine.generate(PROMPTS, letters)]
    pairs = [text[i : i + 2] for text in plain for i in (1, 4)]
    words = {pair for pair in pairs if len(engine.tokenizer.encode(pair)) == 2}
    words.add(plain[0][0])  # and a single token
    assert len(words) > 4
    params = greedy(allowed_token_ids=LETTERS, bad_words=sorted(words))

    def edit(logits: Tensor, prompt: list[int], output: list[int]) -> None:
        said = engine.tokenizer.decode(output)
        for token in range(len(logits)):
            if token not in LETTERS or any(
                (said + engine.tokenizer.token_text(token)).endswith(word) for word in words
            ):
                logits[token] = -torch.inf

    result = engine.generate(PROMPTS, params)
    assert tokens(result) == by_hand(reference, edit)
    for completion in result:
        assert not any(word in completion.text for word in words)
    assert tokens(hard_pressed.generate(PROMPTS, params)) == tokens(result)


def test_a_sample_with_everything_on_is_the_same_whatever_else_runs(
    engine: Engine, hard_pressed: Engine
) -> None:
    params = SamplingParams(
        temperature=1.3,
        top_p=0.97,
        min_p=0.001,
        seed=11,
        max_tokens=40,
        min_tokens=20,
        n=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias={60: 1.5, 61: -2},
        allowed_token_ids=tuple(range(1, 300)),
        bad_words=("ab", "q"),
    )
    alone = engine.generate([PROMPTS[2]], params)[0]
    others: list[SamplingParams] = [
        SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, presence_penalty=2.0),
        greedy(),
        greedy(repetition_penalty=2.0, n=3),
        SamplingParams(temperature=1, top_k=5, max_tokens=30, logit_bias={5: 50}),
    ]
    for crowd in (engine, hard_pressed):
        same = crowd.generate([*PROMPTS[:4], PROMPTS[2]], [*others, params])[4]
        assert [o.token_ids for o in same.outputs] == [o.token_ids for o in alone.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
    without = SamplingParams(temperature=1.3, top_p=0.97, min_p=0.001, seed=11, max_tokens=40, n=2)
    plain = engine.generate([PROMPTS[2]], without)[0]
    assert plain.outputs[0].token_ids != alone.outputs[0].token_ids


def test_logprobs_are_of_the_distribution_before_edits(engine: Engine, reference: Any) -> None:
    params = greedy(max_tokens=6, logprobs=0, logit_bias={25: 100}, presence_penalty=1)
    output = engine.generate([PROMPTS[1]], params)[0].outputs[0]
    assert output.token_ids == [25] * 6
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPTS[1] + output.token_ids])).logits[0, len(PROMPTS[1]) - 1 : -1]
    truth = torch.log_softmax(logits.double(), -1)
    for row, entries in zip(truth, output.logprobs, strict=True):
        rank = 1 + int((row > row[25]).sum())
        best = int(row.argmax())
        expected = [(25, rank)] if best == 25 else [(25, rank), (best, 1)]
        assert [(e.token_id, e.rank) for e in entries] == expected
        for entry in entries:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), rel=1e-4, abs=1e-4)
    assert {len(entries) for entries in output.logprobs} >= {2}


def check_prompt_logprobs(engine: Engine, reference: Any, completion: Completion, num_best: int) -> None:
    prompt = list(completion.prompt_token_ids)
    entries = completion.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    with torch.no_grad():
        truth = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1)
    for position in range(1, len(prompt)):
        row, token, found = truth[position - 1], prompt[position], entries[position]
        assert found is not None
        best = row.topk(max(num_best, 1)).indices.tolist()
        assert [e.token_id for e in found] == [token, *(b for b in best if b != token)]
        for entry in found:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), rel=1e-4, abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert entry.decoded_token == engine.tokenizer.token_text(entry.token_id)


@pytest.mark.parametrize("num_best", [0, 3])
def test_prompt_logprobs_are_those_of_transformers(
    engine: Engine, hard_pressed: Engine, reference: Any, num_best: int
) -> None:
    asking = greedy(prompt_logprobs=num_best, n=2)
    params = [asking, asking, greedy(), asking, asking]
    expected = tokens(engine.generate(PROMPTS, greedy()))
    for tried in (engine, hard_pressed):
        for _ in range(2):  # with every prefix in the cache the second time
            done = tried.generate(PROMPTS, params)
            assert tokens(done) == expected
            assert done[2].prompt_logprobs is None
            for index in (0, 1, 3, 4):
                check_prompt_logprobs(tried, reference, done[index], num_best)
    assert hard_pressed.stats().preemptions_total > 0


def test_a_prompt_that_lacks_log_probabilities_takes_nothing_from_the_cache(engine: Engine) -> None:
    engine.generate([PROMPTS[4]], greedy())
    before = engine.stats().prefix_hits_total
    engine.generate([PROMPTS[4]], greedy(prompt_logprobs=1))
    assert engine.stats().prefix_hits_total == before
    engine.generate([PROMPTS[4]], greedy())
    assert engine.stats().prefix_hits_total == before + 96


def test_once_it_has_them_a_preempted_sequence_takes_its_prompt_from_the_cache(
    engine: Engine, reference: Any
) -> None:
    deltas: list[TextDelta] = []
    params = greedy(prompt_logprobs=2)
    engine.add(engine.make_request("r", PROMPTS[4], params), deltas.append)
    for _ in range(4):
        engine.step()
    scheduler = engine._scheduler
    scheduler._preempt(scheduler._running.pop())
    before = engine.stats().prefix_hits_total
    while engine.has_work:
        engine.step()
    assert engine.stats().prefix_hits_total == before + 96
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    ids = [token for delta in deltas for token in delta.token_ids]
    assert [ids] == tokens(engine.generate([PROMPTS[4]], greedy()))
    whole = Completion(PROMPTS[4], tuple(PROMPTS[4]), [], deltas[0].prompt_logprobs)
    check_prompt_logprobs(engine, reference, whole, 2)


def test_a_long_prompt_takes_its_log_probabilities_in_pieces(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.models.decoder import Decoder

    sizes = []
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, h: sizes.append(len(h)) or logits(self, h))
    prompt = [3 + (i * 7 + i * i) % 250 for i in range(200)]
    (done,) = engine.generate([prompt], greedy(max_tokens=1, prompt_logprobs=1))
    check_prompt_logprobs(engine, reference, done, 1)
    assert sizes == [64, 64, 64, 7]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_answers_the_most_probable_of_several(engine: Engine, logprobs: int | None) -> None:
    hot = {"temperature": 1.5, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    (every,) = engine.generate([PROMPTS[2]], SamplingParams(**hot, n=6, logprobs=0))
    best = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)[:2]
    assert best[0] is not every.outputs[0]
    (done,) = engine.generate([PROMPTS[2]], SamplingParams(**hot, n=2, best_of=6, logprobs=logprobs))
    assert len(done.outputs) == 2
    for output, expected in zip(done.outputs, best, strict=True):
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-5)
        assert output.finish_reason == "length"
        assert len(output.logprobs) == (0 if logprobs is None else 12)


def test_the_prompt_of_several_is_computed_once(engine: Engine) -> None:
    engine.add(engine.make_request("r", PROMPTS[4], greedy(n=1, best_of=8)), lambda delta: None)
    engine.step()
    engine.step()
    assert engine.stats().num_used_blocks == 6 + 8  # of 99 tokens: six full blocks, and each its own last one
    engine.abort("r")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"allowed_token_ids": [5, 320]}, "'allowed_token_ids' holds 320; allowed: 0 to 319"),
        ({"allowed_token_ids": [5] * 321}, "'allowed_token_ids' has 321 ids; the vocabulary has 320"),
        ({"logit_bias": {"9999": 1}}, "'logit_bias' holds 9999; allowed: 0 to 319"),
        ({"stop_token_ids": [320]}, "'stop_token_ids' holds 320; allowed: 0 to 319"),
        ({"n": 2, "best_of": 17}, "'best_of' is 17; this server runs at most 16 sequences"),
        ({"n": 17}, "'n' is 17; this server runs at most 16 sequences"),
        *(
            (
                {"allowed_token_ids": allowed, **values},
                "'bad_words' and 'min_tokens', before which no stop token may come, leave nothing of "
                "'allowed_token_ids' (every token, when unset); allow one more",
            )
            for allowed, values in (
                ([EOS], {"min_tokens": 1}),
                ([7, 9], {"min_tokens": 2, "stop_token_ids": [9, 7], "ignore_eos": True}),
                ([THE, EOS], {"min_tokens": 1, "bad_words": ["the"]}),
            )
        ),
    ],
)
def test_what_the_model_has_no_room_for(engine: Engine, values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        engine.make_request("r", [5, 6], SamplingParams.parse(values))
    assert str(caught.value) == text
