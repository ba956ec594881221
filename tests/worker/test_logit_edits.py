"""What parameters do to logits, against Transformers' processors and against definitions written out."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.protocol import RowSampling
from octavo.worker.logit_edits import LogitEdits, RowEdits, edited, to_device

VOCAB = 60


def sampling(**values: Any) -> RowSampling:
    return RowSampling(0.0, 0, 1.0, 0.0, seed=0, **values)


def logits_for(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def edits_for(prompt: list[int], output: list[int], **values: Any) -> LogitEdits | None:
    return RowEdits(sampling(**values)).next(np.array(prompt + output, np.int32), len(prompt))


def edit(logits: Tensor, histories: list[tuple[list[int], list[int]]], **values: Any) -> Tensor:
    """The same parameters for every row."""
    edits: Mapping[int, LogitEdits] = {
        index: found
        for index, (prompt, output) in enumerate(histories)
        if (found := edits_for(prompt, output, **values)) is not None
    }
    before = logits.clone()
    result = edited(logits, to_device(edits, torch.from_numpy)) if edits else logits
    assert torch.equal(logits, before)
    return result


def histories(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(seed)
    return [
        (rng.choices(range(VOCAB), k=rng.randint(1, 90)), rng.choices(range(VOCAB), k=rng.randint(0, 90)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 20.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, rows = logits_for(6), histories(6)
    result = edit(logits, rows, repetition_penalty=penalty)
    process = RepetitionPenaltyLogitsProcessor(penalty)
    for row, (prompt, output) in enumerate(rows):
        expected = process(torch.tensor([prompt + output]), logits[row : row + 1].clone())[0]
        assert torch.allclose(result[row], expected, rtol=1e-6)
        assert not torch.equal(result[row], logits[row])


def test_presence_and_frequency_penalties_are_those_of_openai() -> None:
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c over the output alone."""
    logits, rows = logits_for(5), histories(5, seed=1)
    rows[0] = (rows[0][0], [])
    result = edit(logits, rows, frequency_penalty=0.75, presence_penalty=-1.5)
    for row, (_, output) in enumerate(rows):
        for token in range(VOCAB):
            taken_off = 0.75 * output.count(token) + -1.5 * (token in output)
            expected = float(logits[row, token]) - taken_off
            assert float(result[row, token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_bias_is_added_before_the_penalties() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    values = {"logit_bias": ((0, -6.0), (3, 5.0)), "repetition_penalty": 2.0, "presence_penalty": 1.0}
    result = edit(logits, [([0], [3])], **values)
    assert result.tolist() == [[-8.0, -1.0, 0.5, 3.0]]


def test_only_allowed_tokens_are_left_as_they_are() -> None:
    logits = logits_for(3)
    edits = {1: LogitEdits(allowed=np.array([4, 9])), 2: LogitEdits(forbidden=np.array([7, VOCAB, 10**6]))}
    result = edited(logits, to_device(edits, torch.from_numpy))
    assert torch.equal(result[0], logits[0])
    assert result[1].isfinite().nonzero()[:, 0].tolist() == [4, 9]
    assert torch.equal(result[1, [4, 9]], logits[1, [4, 9]])
    assert (~result[2].isfinite()).nonzero()[:, 0].tolist() == [7]
    ids = edits_for([1], [2], allowed_ids=(9, 4, 9))
    assert ids is not None
    assert ids.allowed is not None
    assert ids.allowed.tolist() == [4, 9]


def test_a_bad_word_is_forbidden_at_its_last_token_after_the_others() -> None:
    words = ((5,), (1, 2), (1, 2, 3), (2, 4), (8, 8))

    def forbidden(*output: int) -> list[int]:
        edits = edits_for([8, 1], list(output), bad_words=words)
        assert edits is not None
        return edits.forbidden.tolist()

    assert forbidden() == [5]  # the prompt's 8 and 1 are no beginning of a word
    assert forbidden(1) == [2, 5]
    assert forbidden(1, 2) == [3, 4, 5]
    assert forbidden(9, 2) == [4, 5]
    assert forbidden(8) == [5, 8]
    assert forbidden(1, 9) == [5]


def test_min_tokens_forbid_what_would_end_the_sequence() -> None:
    values = {"min_tokens": 2, "stop_ids": (9, 7), "bad_words": ((3, 7), (3, 1))}
    first = edits_for([5], [3], **values)
    assert first is not None
    assert first.forbidden.tolist() == [1, 7, 9]
    assert edits_for([5], [3, 4], **values) is None


def test_nothing_to_edit_is_none() -> None:
    assert not RowEdits.wanted(sampling(stop_ids=(3,)))
    assert not RowEdits.wanted(sampling(min_tokens=3))
    wanted: list[dict[str, Any]] = [
        {"repetition_penalty": 0.9},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": ((0, 0.5),)},
        {"allowed_ids": (0,)},
        {"bad_words": ((0,),)},
        {"min_tokens": 1, "stop_ids": (0,)},
    ]
    assert all(RowEdits.wanted(sampling(**values)) for values in wanted)
    assert edits_for([1, 2], [], presence_penalty=1.0) is None  # nothing was generated yet
    assert edits_for([1, 2], [], repetition_penalty=2.0) is not None


def test_reading_on_gives_what_reading_anew_gives() -> None:
    """A row is read as it grows, in whatever steps; a resumed one all at once."""
    values = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bad_words": ((3, 4), (7,))}
    rng = random.Random(3)
    for prompt, output in histories(20, seed=2):
        tokens = np.array(prompt + output, np.int32)
        growing = RowEdits(sampling(**values))
        end = len(prompt)
        while end < len(tokens):
            growing.next(tokens[:end], len(prompt))
            end += rng.randint(1, 5)
        ours, anew = growing.next(tokens, len(prompt)), edits_for(prompt, output, **values)
        assert ours is not None
        assert anew is not None
        assert ours.seen.tolist() == anew.seen.tolist()
        assert ours.counts.tolist() == anew.counts.tolist()
        assert ours.forbidden.tolist() == anew.forbidden.tolist()


def test_all_of_it_together_is_in_float32() -> None:
    logits = logits_for(4).bfloat16()
    result = edit(logits, histories(4, seed=4), repetition_penalty=1.1, logit_bias=((1, 0.001),))
    assert result.dtype == torch.float32
    assert not torch.equal(result, result.bfloat16().float())
