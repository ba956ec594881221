"""Native sampling and log-probabilities: against the reference, the exact distribution, and at the edges."""

from ctypes import CDLL
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from octavo_kernels import ops, reference
from octavo_kernels.cpu import sampling as cpu_sampling

pytestmark = pytest.mark.usefixtures("native")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = pytest.mark.parametrize("size", [1, 7, 63, 255, 256, 1000, 49152])

Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def columns(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Columns:
    uniforms = torch.rand(rows, dtype=torch.float64)
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        uniforms,
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


def exact_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """`logits` [V] without equals."""
    weights, order = (logits.double() / temperature).softmax(0).sort(descending=True)
    weights[weights < min_p * weights[0]] = 0
    weights[top_k or len(weights) :] = 0
    ends = weights.cumsum(0)
    weights[ends - weights >= top_p * ends[-1]] = 0
    return torch.zeros_like(weights).index_put((order,), weights / weights.sum())


@DTYPES
@SIZES
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
def test_the_tokens_of_the_reference(size: int, spread: float, dtype: torch.dtype) -> None:
    """Where equals are, those of the same logit: the reference orders them in no particular way."""
    rows = 64 if size > 1000 else 512
    logits = (torch.randn(rows, size) * spread + 3).to(dtype)
    settings = mixed_columns(rows, size)
    actual = ops.sample(logits, *settings)
    expected = reference.sampling.sample(logits, *settings)
    assert int(actual.min()) >= 0
    assert int(actual.max()) < size
    drawn, wanted = (logits.gather(1, ids[:, None])[:, 0] for ids in (actual, expected))
    # The point drawn may lie so close to a boundary that rounding decides.
    assert int((drawn != wanted).sum()) <= 2, (actual[drawn != wanted], expected[drawn != wanted])
    if dtype == torch.float32 and size <= 1000:
        assert int((actual != expected).sum()) <= 2


@pytest.mark.parametrize(
    "settings",
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.1), (1.5, 12, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (2.0, 40, 0.9, 0.02)],
    ids=str,
)
@pytest.mark.parametrize("size", [63, 300])
def test_chi_square_of_the_exact_distribution(size: int, settings: tuple[float, int, float, float]) -> None:
    logits = torch.randn(size) * 1.5
    count = 40000
    tokens = ops.sample(logits.expand(count, -1), *columns(count, *settings))
    observed = tokens.bincount(minlength=size).double()
    expected = exact_distribution(logits, *settings) * count
    possible = expected > 0
    assert observed[~possible].sum() == 0
    rare = possible & (expected < 5)  # counted together
    common = expected >= 5
    cells = torch.cat((observed[common], observed[rare].sum()[None]))
    means = torch.cat((expected[common], expected[rare].sum()[None]))
    cells, means = cells[means > 0], means[means > 0]
    freedom = len(cells) - 1
    chi_square = float(((cells - means) ** 2 / means).sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@DTYPES
def test_only_one_token_is_left(dtype: torch.dtype) -> None:
    for size in (1, 17, 1000):
        logits = torch.full((8, size), -torch.inf).to(dtype)
        logits[:, size // 2] = -40.0
        for settings in (
            columns(8),
            columns(8, top_k=5),
            columns(8, top_p=0.5),
            columns(8, 9.0, 3, 0.9, 0.1),
        ):
            assert ops.sample(logits, *settings).tolist() == [size // 2] * 8


@DTYPES
def test_ruled_out_tokens_are_never_drawn(dtype: torch.dtype) -> None:
    logits = torch.randn(400, 700).to(dtype)
    ruled_out = torch.rand(400, 700) < 0.9
    ruled_out[:, 300] = False
    logits[ruled_out] = -torch.inf
    drawn = ops.sample(logits, *mixed_columns(400, 700))
    assert not ruled_out.gather(1, drawn[:, None]).any()


@DTYPES
@pytest.mark.parametrize("logit", [-300.0, 0.0, 17.0])
def test_equals_are_drawn_in_the_order_of_their_ids(logit: float, dtype: torch.dtype) -> None:
    size = 1000
    logits = torch.full((size, size), logit).to(dtype)
    logits[:, 0] = -torch.inf
    middles = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    for settings, kept in (
        (columns(size), 999),
        (columns(size, top_k=10), 10),
        (columns(size, top_p=0.5), 500),
        (columns(size, 7.0, 100, 0.25), 25),
        (columns(size, min_p=1.0), 999),
    ):
        drawn = ops.sample(logits, *settings[:4], middles)
        assert drawn.tolist() == (1 + (middles * kept).long()).tolist()


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (1.0, 511, 1.0, 0.0), (1.0, 0, 0.75, 0.0)], ids=str)
def test_a_point_between_two_tokens_is_the_latter(settings: tuple[float, int, float, float]) -> None:
    logits = torch.zeros(512, 512)
    logits[:, 256:] = -torch.inf
    starts = torch.arange(512, dtype=torch.float64) / 512
    kept = 192 if settings[2] < 1 else 256
    expected = (starts * kept).long().tolist()
    assert ops.sample(logits, *columns(512, *settings)[:4], starts).tolist() == expected


def test_the_two_zeros_are_equals() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    settings = columns(1, top_k=2)
    for uniform, token in ((0.4, 1), (0.6, 2)):
        settings[4][0] = uniform
        assert ops.sample(logits, *settings).tolist() == [token]
    _, rank, best_ids, _, best_ranks = ops.token_logprobs(logits, torch.tensor([3]), 4)
    assert rank.tolist() == [1]
    assert best_ids.tolist() == [[1, 2, 3, 0]]
    assert best_ranks.tolist() == [[1, 1, 1, 4]]


@DTYPES
@pytest.mark.parametrize(
    "settings",
    [(1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0), (1e-6, 0, 1.0, 0.0), (1e-40, 9, 0.5, 0.0)],
    ids=str,
)
def test_the_best_is_always_kept(settings: tuple[float, int, float, float], dtype: torch.dtype) -> None:
    logits = torch.randn(40, 3000).to(dtype)
    logits[torch.arange(40), torch.randperm(3000)[:40]] = 6.0
    assert torch.equal(ops.sample(logits, *columns(40, *settings)), logits.argmax(dim=-1))


@DTYPES
def test_a_huge_temperature_makes_all_equal(dtype: torch.dtype) -> None:
    logits = (torch.randn(512, 512) * 10).to(dtype)
    settings = columns(512, temperature=1e30)
    middles = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
    assert ops.sample(logits, *settings[:4], middles).tolist() == list(range(512))
    ordered = ops.sample(
        logits[:1].expand(512, -1), *columns(512, temperature=1e30, top_p=0.999)[:4], middles
    )
    assert ordered.tolist() == logits[0].sort(descending=True, stable=True).indices.tolist()


@DTYPES
def test_a_row_is_drawn_as_if_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(40, 5001).to(dtype)
    settings = mixed_columns(40, 5001)
    together = ops.sample(logits, *settings)
    for row in range(40):
        only = slice(row, row + 1)
        assert ops.sample(logits[only], *(column[only] for column in settings)).tolist() == [together[row]]
    back = torch.arange(39, -1, -1)
    assert torch.equal(ops.sample(logits[back], *(column[back] for column in settings)), together[back])


@DTYPES
def test_the_strides_of_the_logits_do_not_matter(dtype: torch.dtype) -> None:
    pairs = torch.randn(10, 2, 600).to(dtype)
    settings, ids = mixed_columns(10, 600), torch.randint(600, (10,))
    packed = pairs[:, 1].contiguous()
    drawn, logprobs = ops.sample(packed, *settings), ops.token_logprobs(packed, ids, 3)
    for view in (pairs[:, 1], packed.T.contiguous().T):
        assert not view.is_contiguous()
        assert torch.equal(ops.sample(view, *settings), drawn)
        for actual, expected in zip(ops.token_logprobs(view, ids, 3), logprobs, strict=True):
            assert torch.equal(actual, expected)


def test_no_rows_at_all() -> None:
    assert ops.sample(torch.empty(0, 9), *columns(0)).shape == (0,)
    shapes = [tuple(x.shape) for x in ops.token_logprobs(torch.empty(0, 9), torch.empty(0).long(), 2)]
    assert shapes == [(0,), (0,), (0, 2), (0, 2), (0, 2)]


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_meaning_do_no_harm(value: float, dtype: torch.dtype) -> None:
    logits = torch.randn(64, 777).to(dtype)
    logits[:32, 300] = value
    logits[32:48] = value
    drawn = ops.sample(logits, *mixed_columns(64, 777))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 777
    for num_best in (1, 40, 777):
        ids = torch.randint(777, (64,))
        logprob, rank, best_ids, _, _ = ops.token_logprobs(logits, ids, num_best)
        assert 0 <= int(best_ids.min()) <= int(best_ids.max()) < 777
        assert 1 <= int(rank.min()) <= int(rank.max()) <= 777
        assert all(len(set(row)) == num_best for row in best_ids.tolist())
        if value != -torch.inf:
            assert not logprob[:48].isfinite().any()


@DTYPES
@SIZES
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_token_logprobs(size: int, spread: float, dtype: torch.dtype) -> None:
    rows = 8
    logits = (torch.randn(rows, size) * spread - 50).to(dtype)
    logits[:, size // 3] = -torch.inf
    logits[0, size // 2] = -49.5  # a row with something in it, even of one entry
    logits[1:, size - 1] = 2.0
    ids = torch.randint(size, (rows,))
    exact = logits.double() - logits.double().logsumexp(dim=-1, keepdim=True)
    for num_best in sorted({0, 1, min(5, size), min(size, 100), min(size, 1000)}):
        logprob, rank, best_ids, best, best_ranks = ops.token_logprobs(logits, ids, num_best)
        chosen = exact.gather(1, ids[:, None])
        torch.testing.assert_close(logprob.double(), chosen[:, 0], atol=2e-6, rtol=1e-6)
        assert torch.equal(rank, (exact > chosen).sum(dim=-1) + 1)
        values, order = exact.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(best_ids, order[:, :num_best])
        torch.testing.assert_close(best.double(), values[:, :num_best], atol=2e-6, rtol=1e-6)
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


def test_other_types_of_settings_are_left_to_the_reference() -> None:
    logits, settings = torch.randn(3, 50), columns(3, top_k=4)
    assert cpu_sampling.takes_sample(logits, *settings)
    wide = settings[0].double(), *settings[1:]
    assert not cpu_sampling.takes_sample(logits, *wide)
    assert not cpu_sampling.takes_token_logprobs(logits, torch.zeros(3, dtype=torch.int32), 1)
    assert not cpu_sampling.takes_token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 51)


def test_no_memory() -> None:
    without = cast(CDLL, SimpleNamespace(octavo_sample=lambda *_: -1, octavo_token_logprobs=lambda *_: -1))
    logits = torch.randn(2, 50)
    with pytest.raises(MemoryError, match="no memory to order 50 logits"):
        cpu_sampling.sample(without, logits, *columns(2))
    with pytest.raises(MemoryError, match="no memory to order 50 logits"):
        cpu_sampling.token_logprobs(without, logits, torch.zeros(2, dtype=torch.int64), 3)
