"""The sampling kernels against the exact distribution, computed naively in float64."""

import pytest
import torch
from torch import Tensor

from octavo_kernels import ops
from octavo_kernels.reference import sampling as reference_sampling


def exact_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """vLLM's order, token by token: temperature, min-p, top-k, top-p. `logits` [V] without ties."""
    probs = (logits.double() / temperature).softmax(0)
    probs[probs < min_p * probs.max()] = 0
    ranked = probs.argsort(descending=True).tolist()
    for token in ranked[top_k or None :] if top_k else []:
        probs[token] = 0
    probs /= probs.sum()
    share = 0.0
    for token in ranked:
        if share >= top_p:
            probs[token] = 0
        else:
            share += float(probs[token])
    return probs / probs.sum()


def evenly_drawn(logits: Tensor, settings: tuple[float, int, float, float], count: int) -> Tensor:
    """Shares [V] of the tokens that `count` evenly spaced uniforms give: the exact ones to 1 / count."""
    temperature, top_k, top_p, min_p = settings
    tokens = ops.sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        (torch.arange(count, dtype=torch.float64) + 0.5) / count,
    )
    return tokens.bincount(minlength=len(logits)).double() / count


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.05),
    (1.3, 7, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (0.9, 11, 0.9, 0.0),
    (1.5, 20, 0.95, 0.02),
    (2.0, 300, 0.7, 0.01),  # top-k cuts beyond the first candidates, top-p or min-p before or after
    (3.0, 200, 0.999, 0.0),
    (5.0, 0, 0.99, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1e-4, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [5, 257, 1000])
def test_sample_inverts_the_exact_distribution(
    vocab_size: int, settings: tuple[float, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_sampling, "_CANDIDATES", (8, 64))
    logits = torch.randn(vocab_size) * 2
    count = 4000
    shares = evenly_drawn(logits, settings, count)
    expected = exact_distribution(logits, *settings)
    assert set(shares.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    assert float((shares - expected).abs().max()) <= 1.5 / count


def test_top_p_is_a_share_of_what_top_k_leaves_also_beyond_the_first_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten probable tokens, and a long tail that holds half of everything but is cut by top-k."""
    monkeypatch.setattr(reference_sampling, "_CANDIDATES", (8, 64))
    ranks = torch.arange(1000)
    logits = torch.where(ranks < 10, 4.4, 0.0) - ranks * 1e-4
    settings = (1.0, 100, 0.3, 0.0)
    shares = evenly_drawn(logits, settings, 4000)
    expected = exact_distribution(logits, *settings)
    assert int((expected > 0).sum()) == 4
    assert float((shares - expected).abs().max()) <= 1.5 / 4000


def test_a_point_at_the_very_end_falls_on_the_last_token_that_weighs_anything() -> None:
    """The point inside a tile is a quotient, which may round to one."""
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    index, through = reference_sampling._invert(weights, torch.ones(2, dtype=torch.float64))
    assert index.tolist() == [2, 0]
    assert through.tolist() == [1.0, 1.0]


def test_the_first_and_last_point_fall_on_tokens_that_can_be_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, -torch.inf]]).repeat(2, 1)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    off = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for top_p in (1.0, 0.999):
        tokens = ops.sample(logits, *off, torch.full((2,), top_p), torch.zeros(2), edges)
        assert sorted(tokens.tolist()) == [1, 2]


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    logits = torch.randn(len(SETTINGS), 1000, dtype=torch.float32) * 2
    columns = [torch.tensor(column) for column in zip(*SETTINGS, strict=True)]
    uniforms = torch.rand(len(SETTINGS), dtype=torch.float64)
    together = ops.sample(logits, *columns, uniforms)
    for row in range(len(SETTINGS)):
        only = slice(row, row + 1)
        alone = ops.sample(logits[only], *(column[only] for column in columns), uniforms[only])
        assert alone.tolist() == together[only].tolist()


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    token = ops.sample(logits, one * 1e-3, zero.long(), one, zero, torch.tensor([0.999], dtype=torch.float64))
    assert token.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_best_token(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1003).to(dtype)
    logits[0, 17] = logits[0, 900] = 50.0
    logits[1, 1002] = 60.0
    logits[2] = -torch.inf
    logits[3, 501] = torch.nan
    token_ids, best = ops.best_token(logits)
    assert token_ids[:2].tolist() == [17, 1002]
    assert best[:3].tolist() == [50.0, 60.0, -torch.inf]
    assert best[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_logprobs(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 501).to(dtype)
    token_ids = torch.tensor([0, 250, 500])
    logprob, rank, best_ids, best, best_ranks = ops.token_logprobs(logits, token_ids, 5)
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, token in enumerate(token_ids.tolist()):
        assert logprob[row].item() == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert rank[row].item() == 1 + int((expected[row] > expected[row, token]).sum())
        values = expected[row].sort(descending=True).values[:5]
        torch.testing.assert_close(best[row].double(), values, atol=1e-5, rtol=0)
        torch.testing.assert_close(expected[row, best_ids[row]], values, atol=0, rtol=0)
        ranks = [1 + int((expected[row] > value).sum()) for value in values]
        assert best_ranks[row].tolist() == ranks


def test_equals_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    _, rank, _, _, best_ranks = ops.token_logprobs(logits, torch.tensor([3]), 3)
    assert rank.tolist() == [3]
    assert best_ranks.tolist() == [[1, 1, 3]]


def test_no_best_ones() -> None:
    logprob, rank, best_ids, best, best_ranks = ops.token_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 0)
    assert logprob.tolist() == pytest.approx([-1.3862944] * 2)
    assert rank.tolist() == [1, 1]
    assert best_ids.shape == best.shape == best_ranks.shape == (2, 0)
