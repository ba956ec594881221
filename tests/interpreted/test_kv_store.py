"""Rotation and KV store against the reference: what is stored is the same, byte by byte in float32."""

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_close
from octavo_kernels import kv_format, ops, reference

TYPES = [  # of a batch, and of its cache
    *((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    (torch.float32, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.int8),
]
ROTATED = [(1, 1, 1, 64, 8), (63, 7, 7, 80, 16), (21, 40, 3, 128, 32), (3, 4, 1, 256, 128), (9, 3, 3, 2, 1)]
STORED = [(1, 3, 64, 8), (63, 1, 10, 1), (63, 7, 128, 16)]


def with_types(shapes: list[tuple[int, ...]]) -> list[tuple[int | torch.dtype, ...]]:
    """Two shapes for each pair of types, each shape with several."""
    count = len(shapes)
    return [
        (*shapes[(number + more) % count], *types)
        for number, types in enumerate(TYPES)
        for more in (0, count // 2)
    ]


def poisoned(blocks: int, kv_heads: int, head_size: int, block_size: int, kind: torch.dtype) -> list[Tensor]:
    """Caches of keys and values of which every byte is all ones: NaNs, where the type has one."""
    shape = blocks, *kv_format.block_shape(kv_heads, block_size, head_size, kind)
    num_bytes = math.prod(shape) * kind.itemsize
    return [torch.full((num_bytes,), 255, dtype=torch.uint8).view(kind).view(shape) for _ in range(2)]


def rotation(tokens: int, head_size: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, head_size // 2) * 50
    sin = angles.sin()
    return torch.cat((angles.cos(), angles.cos()), dim=-1), torch.cat((-sin, sin), dim=-1)


def store_by_reference(k: Tensor, v: Tensor, caches: list[Tensor], slots: Tensor) -> None:
    block_size = kv_format.block_size(caches[0], k.shape[2])
    layout = ops.KVLayout(k.shape[1], block_size, None, k.device)
    reference.kv_store.kv_store(k, v, *caches, reference.plan.slot_rows(layout, slots.numpy()))


def some_slots(tokens: int, slots: int) -> Tensor:
    """Each at most once; every fifth token has none."""
    chosen = torch.randperm(slots)[:tokens]
    chosen[1::5] = -1
    return chosen


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_size", "block_size", "dtype", "kind"), with_types(ROTATED), ids=str
)
def test_rope_and_store(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    kind: torch.dtype,
) -> None:
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    cos, sin = rotation(tokens, head_size)
    blocks = -(-tokens // block_size) + 2
    slots = some_slots(tokens, blocks * block_size)
    actual, expected = (poisoned(blocks, kv_heads, head_size, block_size, kind) for _ in range(2))
    rotated = reference.rope.rope(qkv[:, : heads + kv_heads].float(), cos, sin)
    rotated = kv_format.spread(rotated) if kv_format.is_quantised(kind) else rotated.to(dtype)
    store_by_reference(rotated[:, heads:], qkv[:, heads + kv_heads :], expected, slots)
    q = ops.rope_and_store(qkv.clone(), heads, cos, sin, *actual, slots)
    assert_close("queries", q, rotated[:, :heads].to(dtype))
    for name, cache, wanted in zip(("keys", "values"), actual, expected, strict=True):
        bytes_of, wanted_bytes = cache.view(torch.uint8), wanted.view(torch.uint8)
        if name == "values":
            assert torch.equal(bytes_of, wanted_bytes), (
                f"{name}: {int((bytes_of != wanted_bytes).sum())} bytes"
            )
        elif kind == dtype:
            written = ~wanted.isnan()
            assert torch.equal(~cache.isnan(), written), f"{name}: something else was written"
            if written.any():
                assert_close(name, cache[written], wanted[written])
        else:  # a spread key is added up in another order
            far = (bytes_of.view(torch.int8).int() - wanted_bytes.view(torch.int8).int()).abs()
            assert float((far > 1).float().mean()) < 0.01, f"{name}: {int((far > 1).sum())} numbers"


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_size", "block_size", "dtype", "kind"), with_types(STORED), ids=str
)
def test_kv_store_of_any_strides(
    tokens: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    k = torch.randn(tokens, kv_heads + 2, head_size).to(dtype)[:, 1:-1]
    v = torch.randn(head_size, kv_heads, tokens).to(dtype).permute(2, 1, 0)
    blocks = -(-tokens // block_size) + 2
    slots = some_slots(tokens, blocks * block_size)
    actual, expected = (poisoned(blocks, kv_heads, head_size, block_size, kind) for _ in range(2))
    ops.kv_store(k, v, *actual, slots)
    store_by_reference(k, v, expected, slots)
    for name, cache, wanted in zip(("keys", "values"), actual, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8)), name


def test_a_long_prompt() -> None:
    x, slots = torch.randn(1000, 1, 64), some_slots(1000, 8 * 128)
    actual, expected = (poisoned(8, 1, 64, 128, torch.float32) for _ in range(2))
    ops.kv_store(x, x.roll(1), *actual, slots)
    store_by_reference(x, x.roll(1), expected, slots)
    for name, cache, wanted in zip(("keys", "values"), actual, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8)), name


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_every_size_and_odd_ones(dtype: torch.dtype, kind: torch.dtype) -> None:
    tokens = 150
    x = torch.randn(tokens, 1, 64) * torch.logspace(-35, 30, tokens)[:, None, None]
    x[0] = 0.0
    for row, odd in enumerate((math.nan, math.inf, -math.inf, -math.nan), 1):
        x[row, :, 1] = odd
    x = x.to(dtype)
    slots = torch.randperm(30 * 16)[:tokens]
    actual, expected = (poisoned(30, 1, 64, 16, kind) for _ in range(2))
    ops.kv_store(x, x, *actual, slots)
    store_by_reference(x, x, expected, slots)
    tiles = [caches[0].flatten(0, 1) for caches in (actual, expected)]
    left, right = (kv_format.dequantise(tile, 64, torch.float32) for tile in tiles)
    assert torch.equal(left.isnan(), right.isnan())
    assert torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


def test_no_tokens_at_all() -> None:
    caches = poisoned(2, 3, 64, 8, torch.float32)
    empty = torch.empty(0, 3, 64)
    ops.kv_store(empty, empty, *caches, torch.empty(0, dtype=torch.int64))
    angles = torch.empty(0, 64)
    assert ops.rope_and_store(
        torch.empty(0, 10, 64), 4, angles, angles, *caches, torch.empty(0, dtype=torch.int64)
    ).shape == (0, 4, 64)
    assert all(cache.isnan().all() for cache in caches)
