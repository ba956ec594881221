"""Sampling and log-probabilities: against the exact distribution, the reference, and at the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from octavo_kernels import ops, reference

SHAPES = pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, torch.float32),
        (7, torch.bfloat16),
        (255, torch.float16),
        (257, torch.float32),
        (1000, torch.bfloat16),
        (4097, torch.float32),
    ],
    ids=str,
)
# What float32 exponentials may be off by, as a share of a distribution: a point of the way through it that is
# closer to the boundary between two tokens may fall on either.
CLOSE = 2e-6

Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def columns(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Columns:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.rand(rows, dtype=torch.float64),
    )


def mixed_columns(rows: int, size: int) -> Columns:
    """Every combination of what is on and off, at random strengths."""
    on = (torch.arange(rows)[:, None] >> torch.arange(3)) & 1
    top_k = torch.randint(1, size + 2, (rows,)).double() ** torch.rand(rows, dtype=torch.float64)
    return (
        torch.exp(torch.randn(rows)),
        on[:, 0] * top_k.long(),
        torch.where(on[:, 1] > 0, torch.rand(rows).clamp_min(1e-3), 1.0),
        on[:, 2] * torch.rand(rows) ** 4,
        torch.rand(rows, dtype=torch.float64),
    )


def middles(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def interval(
    logits: Tensor, token: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, float]:
    """Where the token lies in the exact distribution of one row: in the order of ids where nothing is cut off
    by order, else from the best down, equals in the order of their ids. Empty if it cannot be drawn."""
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    order = torch.arange(len(weights))
    weights[weights < min_p] = 0
    if 0 < top_k < len(weights) or top_p < 1:
        order = logits.double().sort(descending=True, stable=True).indices
        weights = weights[order]
        weights[top_k or len(weights) :] = 0
        ends = weights.cumsum(0)
        weights[ends - weights >= top_p * ends[-1]] = 0
    place = int((order == token).nonzero())
    ends = weights.cumsum(0) / weights.sum()
    return float(ends[place - 1]) if place else 0.0, float(ends[place])


def check(logits: Tensor, settings: Columns) -> Tensor:
    """Draws, and looks where in the exact distribution each draw lies."""
    drawn = ops.sample(logits, *settings)
    for row, (token, temperature, top_k, top_p, min_p, uniform) in enumerate(
        zip(drawn.tolist(), *(column.tolist() for column in settings), strict=True)
    ):
        # Rounding may also put a token on the other side of what top-p and min-p keep.
        cuts = [(top_p * (1 + off), min_p * (1 + more)) for off in (0, CLOSE, -CLOSE) for more in (0, CLOSE)]
        found = [interval(logits[row], token, temperature, top_k, min(p, 1.0), m) for p, m in cuts]
        assert any(begin - CLOSE <= uniform <= end + CLOSE and end > begin for begin, end in found), (
            f"row {row}: token {token} lies in {found[0]}, not at {uniform}"
        )
    return drawn


@SHAPES
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_a_draw_lies_where_the_uniform_number_says(size: int, spread: float, dtype: torch.dtype) -> None:
    rows = 8
    logits = (torch.randn(rows, size) * spread + 3).to(dtype)
    check(logits, mixed_columns(rows, size))


def test_the_tokens_of_the_reference() -> None:
    logits = torch.randn(32, 63) * 3
    settings = mixed_columns(32, 63)
    assert torch.equal(check(logits, settings), reference.sampling.sample(logits, *settings))


@pytest.mark.parametrize("logit", [-300.0, 0.0])
def test_equals_are_drawn_in_the_order_of_their_ids(logit: float) -> None:
    size, rows = 1000, 13
    logits = torch.full((rows, size), logit)
    logits[:, 0] = -torch.inf
    for settings, kept in (
        (columns(rows), 999),
        (columns(rows, top_k=10), 10),
        (columns(rows, top_p=0.5), 500),
        (columns(rows, 7.0, 100, 0.25), 25),
        (columns(rows, min_p=1.0), 999),
    ):
        drawn = ops.sample(logits, *settings[:4], middles(rows))
        assert drawn.tolist() == (1 + (middles(rows) * kept).long()).tolist()


@pytest.mark.parametrize(
    "settings",
    [(1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0), (1e-6, 0, 1.0, 0.0), (1e-40, 9, 0.5, 0.0)],
    ids=str,
)
def test_the_best_is_always_kept(settings: tuple[float, int, float, float]) -> None:
    logits = torch.randn(3, 3000)
    logits[torch.arange(3), torch.randperm(3000)[:3]] = 6.0
    assert torch.equal(ops.sample(logits, *columns(3, *settings)), logits.argmax(dim=-1))


def test_top_k_of_one_is_the_first_of_equals() -> None:
    logits = torch.randn(3, 5000)
    logits[:, [4500, 700, 900]] = 9.0
    assert ops.sample(logits, *columns(3, 2.0, 1, 0.5)).tolist() == [700] * 3


def test_only_one_token_is_left() -> None:
    for size in (1, 17, 1000):
        logits = torch.full((2, size), -torch.inf)
        logits[:, size // 2] = -40.0
        for settings in (
            columns(2),
            columns(2, top_k=5),
            columns(2, top_p=0.5),
            columns(2, 9.0, 3, 0.9, 0.1),
        ):
            assert ops.sample(logits, *settings).tolist() == [size // 2] * 2


def test_ruled_out_tokens_are_never_drawn() -> None:
    logits = torch.randn(16, 700)
    ruled_out = torch.rand(16, 700) < 0.9
    ruled_out[:, 300] = False
    logits[ruled_out] = -torch.inf
    drawn = check(logits, mixed_columns(16, 700))
    assert not ruled_out.gather(1, drawn[:, None]).any()


def test_a_huge_temperature_makes_all_equal() -> None:
    logits = (torch.randn(1, 512) * 10).bfloat16().expand(16, -1)
    drawn = ops.sample(logits, *columns(16, temperature=1e30)[:4], middles(16))
    assert drawn.tolist() == (middles(16) * 512).long().tolist()
    settings = columns(16, temperature=1e30, top_p=0.999)
    order = logits[0].float().sort(descending=True, stable=True).indices
    drawn = ops.sample(logits, *settings[:4], middles(16))
    assert drawn.tolist() == order[(middles(16) * 512).long()].tolist()


def test_a_row_is_drawn_as_if_alone_and_the_strides_do_not_matter() -> None:
    pairs = torch.randn(8, 2, 700).bfloat16()
    logits, settings = pairs[:, 1], mixed_columns(8, 700)
    together = ops.sample(logits.contiguous(), *settings)
    assert torch.equal(ops.sample(logits, *settings), together)
    assert torch.equal(ops.sample(logits.T.contiguous().T, *settings), together)
    back = torch.arange(7, -1, -1)
    assert torch.equal(ops.sample(logits[back], *(column[back] for column in settings)), together[back])
    for row in (0, 3, 7):
        only = slice(row, row + 1)
        assert ops.sample(logits[only], *(column[only] for column in settings)).tolist() == [together[row]]


def test_the_first_and_the_last_point() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, -torch.inf]]).repeat(2, 1)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for top_p in (1.0, 0.999):
        assert sorted(ops.sample(logits, *columns(2, top_p=top_p)[:4], edges).tolist()) == [1, 2]


def test_the_two_zeros_are_equals() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    settings = columns(1, top_k=2)
    for uniform, token in ((0.4, 1), (0.6, 2)):
        settings[4][0] = uniform
        assert ops.sample(logits, *settings).tolist() == [token]
    assert ops.best_token(logits)[0].tolist() == [1]
    assert ops.best_logits(logits, 3)[0].tolist() == [[1, 2, 3]]
    _, rank, best_ids, _, best_ranks = ops.token_logprobs(logits, torch.tensor([3]), 4)
    assert rank.tolist() == [1]
    assert best_ids.tolist() == [[1, 2, 3, 0]]
    assert best_ranks.tolist() == [[1, 1, 1, 4]]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.nan, torch.float32),
        (-torch.nan, torch.bfloat16),
        (torch.inf, torch.float16),
        (-torch.inf, torch.float32),
    ],
)
def test_rows_without_a_meaning_do_no_harm(value: float, dtype: torch.dtype) -> None:
    logits = torch.randn(18, 777).to(dtype)
    good = reference.sampling.best_token(logits)
    logits[:8, 300] = value
    logits[8:16] = value
    drawn = ops.sample(logits, *mixed_columns(18, 777))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 777
    ids, best = ops.best_token(logits)
    if value != value:
        assert best[:16].isnan().all()
        assert ids[:8].tolist() == [300] * 8
    assert torch.equal(ids[16:], good[0][16:])
    assert torch.equal(best[16:], good[1][16:])
    for num_best in (1, 777):
        ids = torch.randint(777, (18,))
        logprob, rank, best_ids, _, _ = ops.token_logprobs(logits, ids, num_best)
        assert 0 <= int(best_ids.min()) <= int(best_ids.max()) < 777
        assert 1 <= int(rank.min()) <= int(rank.max()) <= 777
        assert all(len(set(row)) == num_best for row in best_ids.tolist())
        if value != -torch.inf:
            assert not logprob[:16].isfinite().any()


@SHAPES
def test_best_token(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, size).to(dtype)
    logits[0, [size // 2, size - 1]] = 50.0
    logits[1, size - 1] = 60.0
    logits[2] = -torch.inf
    ids, best = ops.best_token(logits)
    assert ids[:3].tolist() == [size // 2, size - 1, 0]
    assert best.tolist() == logits.float().amax(dim=-1).tolist()
    assert torch.equal(logits.gather(1, ids[:, None])[:, 0].float(), best)


@SHAPES
def test_best_logits(size: int, dtype: torch.dtype) -> None:
    """Rounding to 16 bits makes many equals."""
    logits = torch.randn(3, size).to(dtype)
    logits[2, size // 2] = torch.nan
    for count in sorted({min(size, 2), min(size, 20), min(size, 300)}):
        ids, values = ops.best_logits(logits, count)
        wanted_ids, wanted = reference.sampling.best(logits, count)
        assert torch.equal(ids[:2], wanted_ids[:2])
        assert torch.equal(values[:2], wanted[:2])
        assert values[2].isnan().all()


NUMBERS = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, 1.0 + 2**-23, -3.0, 3e38, -torch.inf, torch.inf])


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.lists(NUMBERS | st.floats(width=32, allow_nan=False), min_size=2, max_size=300), st.data())
def test_best_logits_of_any_numbers(numbers: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(2, len(numbers)))
    logits = torch.tensor([numbers])
    ids, values = ops.best_logits(logits, count)
    wanted, order = (logits + 0.0).sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == order[:, :count].tolist()
    assert values.tolist() == wanted[:, :count].tolist()


@SHAPES
def test_token_logprobs(size: int, dtype: torch.dtype) -> None:
    rows = 4
    logits = (torch.randn(rows, size) * 4 - 50).to(dtype)
    logits[:, size // 3] = -torch.inf
    logits[0, size // 2] = -49.5  # a row with something in it, even of one entry
    logits[1:, size - 1] = 2.0
    ids = torch.randint(size, (rows,))
    exact = logits.double() - logits.double().logsumexp(dim=-1, keepdim=True)
    values, order = exact.sort(dim=-1, descending=True, stable=True)
    chosen = exact.gather(1, ids[:, None])
    for num_best in sorted({0, 1, min(size, 5), min(size, 300)}):
        logprob, rank, best_ids, best, best_ranks = ops.token_logprobs(logits, ids, num_best)
        torch.testing.assert_close(logprob.double(), chosen[:, 0], atol=3e-6, rtol=1e-6)
        assert torch.equal(rank, (exact > chosen).sum(dim=-1) + 1)
        assert torch.equal(best_ids, order[:, :num_best])
        torch.testing.assert_close(best.double(), values[:, :num_best], atol=3e-6, rtol=1e-6)
        ranks = torch.searchsorted(-values.contiguous(), -values[:, :num_best].contiguous()) + 1
        assert torch.equal(best_ranks, ranks)


def test_huge_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38]])
    logprob, rank, best_ids, best, best_ranks = ops.token_logprobs(logits, torch.tensor([1]), 3)
    assert logprob.tolist() == [-torch.inf]
    assert rank.tolist() == [4]
    assert best_ids.tolist() == [[0, 3, 2]]
    assert best[0, :2].tolist() == pytest.approx([-0.6931472] * 2)
    assert best[0, 2] == pytest.approx(-3e38)
    assert best_ranks.tolist() == [[1, 1, 3]]
    settings = columns(1, temperature=1e-3)
    assert ops.sample(logits, *settings[:4], torch.tensor([0.4], dtype=torch.float64)).tolist() == [0]


def test_no_rows_at_all() -> None:
    empty = torch.empty(0, 9)
    assert ops.sample(empty, *columns(0)).shape == (0,)
    assert [tuple(x.shape) for x in ops.best_token(empty)] == [(0,), (0,)]
    assert [tuple(x.shape) for x in ops.best_logits(empty, 2)] == [(0, 2), (0, 2)]
    shapes = [tuple(x.shape) for x in ops.token_logprobs(empty, torch.empty(0).long(), 2)]
    assert shapes == [(0,), (0,), (0, 2), (0, 2), (0, 2)]
