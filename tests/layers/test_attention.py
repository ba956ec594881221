"""The attention layer: what it rotates, stores and sees, window and scale included."""

import numpy as np
import pytest
import torch

from numerics import assert_close
from octavo.layers.attention import Attention
from octavo.layers.inputs import AttentionInput, LayerCache
from octavo.layers.rope import RotaryEmbedding, frequencies
from octavo_kernels import ops

HEADS, KV_HEADS, SIZE, BLOCK, TOKENS = 4, 2, 6, 4, 11


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_one_prompt(window: int | None, soft_cap: float | None) -> None:
    torch.manual_seed(0)
    cache = LayerCache(*(torch.full((5, KV_HEADS, BLOCK, SIZE), torch.nan) for _ in range(2)))
    table = np.array([[3, 0, 4]], np.int32)
    positions = np.arange(TOKENS)
    slots = table[0, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    layout = ops.KVLayout(KV_HEADS, BLOCK, window, torch.device("cpu"))
    host = table, np.array([TOKENS]), np.array([0, TOKENS])
    batch = AttentionInput(
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(table),
        context_lens=torch.tensor([TOKENS]),
        query_start=torch.tensor([0, TOKENS]),
        plan=ops.plan_batch(layout, *host, slots),
    )
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)
    cos, sin = RotaryEmbedding(frequencies(SIZE, 100.0), 1.0, torch.device("cpu"))(torch.arange(TOKENS))
    attention = Attention(HEADS, KV_HEADS, SIZE, 0.7, window, soft_cap)
    actual = attention(qkv.clone(), cos, sin, cache, batch)  # it may write over it

    q, k, v = qkv.view(TOKENS, -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
    stored = cache.k[slots // BLOCK, :, slots % BLOCK]
    assert_close("stored keys", stored, k)
    assert torch.equal(cache.v[slots // BLOCK, :, slots % BLOCK], v)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).double() * 0.7
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    hidden = (distance < 0) | (distance >= (window or TOKENS))
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", shares, v.double()).flatten(1)
    assert_close("attention", actual, expected)
