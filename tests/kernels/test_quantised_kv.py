"""KV caches of int8 and fp8: what is stored, what attention makes of it, natively and by the reference."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from numerics import assert_close
from octavo_kernels import kv_format, ops
from octavo_kernels.cpu import library
from octavo_kernels.cpu import paged_attention as cpu_paged_attention
from octavo_kernels.cpu import rope_store as cpu_rope_store

FORMATS = pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KERNELS = pytest.mark.usefixtures("kernels")
# The largest error of a number against the largest of its token and head: half a step of 127, or half of the
# last of e4m3's three places at its largest number; and what the scale's rounding adds.
WORST = {torch.int8: 0.5 / 127 * 1.005, torch.float8_e4m3fn: 16 / 448 * 1.005}


def poisoned(blocks: int, heads: tuple[int, int, int], block_size: int, kind: torch.dtype) -> list[Tensor]:
    """Caches of keys and values in which every number every scale is a NaN, as far as the type has one."""
    _, kv_heads, head_size = heads
    shape = blocks, *kv_format.block_shape(kv_heads, block_size, head_size, kind)
    return [torch.full(shape, 255, dtype=torch.uint8).view(kind) for _ in range(2)]


def tokens_of(cache: Tensor, head_size: int, block_size: int) -> Tensor:
    """Every slot of a cache as float64 [N, Hkv, B, D], spelled out number by number."""
    tiles = cache.view(torch.uint8).numpy()
    split = block_size * head_size
    numbers = torch.from_numpy(np.ascontiguousarray(tiles[..., :split])).view(cache.dtype).double()
    scales = torch.from_numpy(np.ascontiguousarray(tiles[..., split:])).view(torch.bfloat16).double()
    return numbers.view(*cache.shape[:2], block_size, head_size) * scales[..., None]


def expected(
    q: Tensor, k: Tensor, v: Tensor, new: int, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    """Attention of one sequence's last `new` tokens in float64: q [new, Hq, D]; k, v [L, Hkv, D]."""
    length, groups = len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.2
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(length - new, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    kind: torch.dtype,
    dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Stores keys and values, and attends to them. `lengths`: (new tokens, context) of each sequence."""
    num_heads, kv_heads, head_size = heads
    counts = [-(-context // block_size) for _, context in lengths]
    free = torch.randperm(sum(counts) + 3).tolist()
    caches = poisoned(len(free), heads, block_size, kind)
    tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    slots = []
    for seq, (_, context) in enumerate(lengths):
        tables[seq, : counts[seq]] = torch.tensor([free.pop() for _ in range(counts[seq])])
        positions = torch.arange(context)
        slots.append(tables[seq].long()[positions // block_size] * block_size + positions % block_size)
    k, v = (torch.randn(sum(map(len, slots)), kv_heads, head_size).to(dtype) for _ in range(2))
    ops.kv_store(k * torch.rand(len(k), 1, 1).to(dtype) * 3, v, *caches, torch.cat(slots))
    starts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths]).int()
    q = torch.randn(int(starts[-1]), num_heads + 1, head_size).to(dtype)[:, :num_heads]
    actual = ops.paged_attention(q, *caches, tables, contexts, starts, 0.2, window, soft_cap)
    stored = [tokens_of(cache, head_size, block_size).transpose(1, 2).flatten(0, 1) for cache in caches]
    parts = [
        expected(q[begin : begin + new], stored[0][where], stored[1][where], new, window, soft_cap)
        for begin, where, (new, _) in zip(starts.tolist(), slots, lengths, strict=False)
    ]
    assert_close("attention", actual, torch.cat(parts))


MIXED = [(70, 70), (33, 129), (1, 300), (7, 7), (1, 1), (1, 64)]
SHAPES = [  # Hq, Hkv, D, and B
    ((3, 1, 64), 16),
    ((6, 3, 80), 1),
    ((7, 7, 128), 3),
    ((32, 2, 16), 128),
    ((4, 2, 256), 8),
    ((5, 1, 10), 5),  # left to the reference
]


@KERNELS
@FORMATS
@DTYPES
@pytest.mark.parametrize(("heads", "block_size"), SHAPES, ids=str)
def test_attention(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    check(MIXED, heads, block_size, kind, dtype)


@KERNELS
@FORMATS
@DTYPES
@pytest.mark.parametrize(("window", "soft_cap"), [(None, 2.0), (1, None), (31, 2.0), (64, None), (129, None)])
def test_window_and_soft_cap(
    window: int | None, soft_cap: float | None, dtype: torch.dtype, kind: torch.dtype
) -> None:
    check([(70, 70), (1, 200), (40, 163), (1, 5)], (6, 3, 64), 8, kind, dtype, window, soft_cap)


@KERNELS
@FORMATS
@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_one_long_sequence_is_divided_by_its_keys(
    threads: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    library.set_num_threads(threads)
    try:
        check([(5, 2100)], (2, 1, 64), 16, kind, dtype)
    finally:
        library.set_num_threads(None)


def rotation(tokens: int, head_size: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, head_size // 2) * 50
    sin = angles.sin()
    return torch.cat((angles.cos(), angles.cos()), dim=-1), torch.cat((-sin, sin), dim=-1)


@KERNELS
@FORMATS
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_size", "block_size"), [(1, 3, 64, 8), (130, 1, 10, 1), (130, 3, 80, 128)]
)
def test_rope_and_store(
    tokens: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    heads = 2 * kv_heads
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    cos, sin = rotation(tokens, head_size)
    caches = poisoned(-(-tokens // block_size) + 2, (heads, kv_heads, head_size), block_size, kind)
    slots = torch.randperm(len(caches[0]) * block_size)[:tokens]
    rotated = kv_format.spread(ops.rope(qkv[:, : heads + kv_heads].float(), cos, sin))
    k, v = rotated[:, heads:].clone(), qkv[:, heads + kv_heads :].clone()
    q = ops.rope_and_store(qkv, heads, cos, sin, *caches, slots)
    assert q.dtype == dtype
    assert_close("queries", q, rotated[:, :heads].to(dtype))
    for name, cache, new in zip(("keys", "values"), caches, (k, v), strict=True):
        stored = tokens_of(cache, head_size, block_size).transpose(1, 2).flatten(0, 1)
        error = (stored[slots] - new.double()).abs().amax(dim=-1) / new.double().abs().amax(dim=-1)
        assert float(error.max()) <= WORST[kind] + 1e-6, f"{name}: {float(error.max()):.4f} of the largest"
        others = torch.ones(len(stored), dtype=torch.bool)
        others[slots] = False
        assert stored[others].isnan().all(), f"{name}: something else was written"


@pytest.mark.parametrize("head_size", [8, 10, 16, 64, 80, 128])
def test_spreading_leaves_products_and_shares_a_large_number(head_size: int) -> None:
    q, k = torch.randn(2, 50, 3, head_size)
    k[..., 5] *= 100
    q_spread, k_spread = kv_format.spread(q), kv_format.spread(k)
    assert_close("products", (q_spread * k_spread).sum(-1), (q * k).sum(-1))
    assert_close("inverse", kv_format.spread(k_spread), k)
    if head_size in (16, 64, 128):
        assert_close(
            "ones",
            kv_format.spread(torch.eye(head_size)).abs() * head_size**0.5,
            torch.ones(head_size, head_size),
        )
        assert k_spread.abs().max() < 2 * k.abs().max() * head_size**-0.5
    else:
        assert torch.equal(k_spread, k)


@pytest.mark.usefixtures("native")
@FORMATS
@DTYPES
@pytest.mark.parametrize("head_size", [2, 10, 64, 256])
def test_native_and_reference_store_the_same_bytes(
    head_size: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Values are not rotated, so that nothing is rounded before; tokens of every size, and odd ones."""
    tokens, heads = 400, (2, 3, head_size)
    qkv = torch.randn(tokens, 2 + 2 * 3, head_size) * torch.logspace(-35, 30, tokens)[:, None, None]
    qkv[0] = 0.0
    for row, odd in enumerate((math.nan, math.inf, -math.inf), 1):
        qkv[row, :, 1] = odd
    qkv = qkv.to(dtype)
    slots = torch.randperm(30 * 16)[:tokens]
    actual, wanted = (poisoned(30, heads, 16, kind) for _ in range(2))
    v = qkv[:, 5:].clone()
    ops.kv_store(v, v, *wanted, slots)
    cos, sin = rotation(tokens, head_size)
    assert cpu_rope_store.takes(qkv, cos, sin, *actual, slots)
    ops.rope_and_store(qkv, 2, cos, sin, *actual, slots)
    left, right = (tokens_of(caches[1], head_size, 16) for caches in (actual, wanted))
    assert torch.equal(left.isnan(), right.isnan())
    assert torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))
    back = right.transpose(1, 2).flatten(0, 1)[slots]
    assert back[1:4].isnan().all()
    assert (back[0] == 0).all()
    ordinary = slice(50, None)
    error = (back - v.double())[ordinary].abs().amax(dim=-1) / v[ordinary].double().abs().amax(dim=-1)
    assert float(error.max()) <= WORST[kind]


@KERNELS
@FORMATS
@DTYPES
def test_a_token_that_is_not_finite_spoils_its_own_sequence_only(
    dtype: torch.dtype, kind: torch.dtype
) -> None:
    heads, block_size = (4, 2, 64), 16
    for where, odd in ((0, math.nan), (0, math.inf), (1, math.nan), (1, -math.inf)):
        caches = poisoned(6, heads, block_size, kind)
        new = [torch.randn(64, 2, 64).to(dtype) for _ in range(2)]
        new[where][3, :, 5] = odd
        ops.kv_store(*new, *caches, torch.arange(64))
        tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        ends = torch.tensor([20, 30]).int(), torch.tensor([0, 1, 2]).int()
        out = ops.paged_attention(torch.randn(2, 4, 64).to(dtype), *caches, tables, *ends, scale=0.2)
        assert out[0].isnan().any(dim=-1).all()
        assert out[1].isfinite().all()


@FORMATS
def test_the_native_kernels_take_quantised_caches(native: str, kind: torch.dtype) -> None:
    caches = poisoned(3, (4, 2, 64), 16, kind)
    q, integers = torch.randn(2, 4, 64), [torch.zeros(2, 3).int(), torch.ones(2).int(), torch.arange(3).int()]
    assert cpu_paged_attention.takes(q, *caches, *integers)
    assert not cpu_paged_attention.takes(q.half(), *caches, *integers)
    assert not cpu_paged_attention.takes(q, caches[0], torch.empty(3, 2, 16, 64), *integers)


def test_twice_the_blocks_but_for_the_scales() -> None:
    for head_size in (64, 128):
        for kind in (torch.int8, torch.float8_e4m3fn):
            plain, quantised = (
                math.prod(kv_format.block_shape(8, 16, head_size, dtype)) * dtype.itemsize
                for dtype in (torch.bfloat16, kind)
            )
            assert plain / quantised == 2 * head_size / (head_size + 2)


@KERNELS
@pytest.mark.parametrize("kind", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_slot_below_zero_stores_nothing(kind: torch.dtype) -> None:
    """Those of the rows that pad a batch."""
    heads, slots = (4, 2, 64), torch.tensor([-1, 9, -1, 30, -1])
    stored = []
    for rows in (slice(None), [1, 3]):
        shape = 4, *kv_format.block_shape(2, 8, 64, kind)
        caches = [
            torch.zeros(shape, dtype=torch.uint8 if kind.itemsize == 1 else kind).view(kind) for _ in range(2)
        ]
        torch.manual_seed(1)
        qkv = torch.randn(5, 8, 64)[rows]
        ops.rope_and_store(qkv, heads[0], *(x[rows] for x in rotation(5, 64)), *caches, slots[rows])
        ops.kv_store(qkv[:, 4:6], qkv[:, 6:], *caches, slots[rows])
        stored.append([cache.view(torch.uint8) for cache in caches])
    for padded, alone in zip(*stored, strict=True):
        assert torch.equal(padded, alone)
        assert padded.any()
