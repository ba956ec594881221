"""`ops.paged_attention` and `ops.kv_store` against a naive float64 twin, with every unused slot a NaN."""

import numpy as np
import pytest
import torch

from numerics import assert_close
from octavo_kernels import ops
from octavo_kernels.reference import plan as reference_plan
from paged_batches import SCALE, make_batch

pytestmark = pytest.mark.usefixtures("kernels")
HEADS = [(6, 2, 16), (9, 3, 64), (5, 1, 10), (4, 4, 2), (7, 1, 80), (7, 7, 128)]  # Hq, Hkv, D

MIXED = [(1, 1), (7, 7), (1, 33), (5, 29), (1, 16), (16, 16), (2, 17), (1, 9), (1, 31)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_mixed_batch(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, heads, block_size, dtype)
    assert_close("attention", batch.attend(), batch.expected())


@pytest.mark.parametrize("window", [1, 4, 9, 64])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_window_and_soft_cap(window: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, block_size=4, dtype=dtype)
    actual = batch.attend(window=window, soft_cap=soft_cap)
    assert_close("attention", actual, batch.expected(window, soft_cap))


def test_a_soft_cap_over_all_keys() -> None:
    batch = make_batch(MIXED, block_size=4)
    assert_close("attention", batch.attend(soft_cap=0.7), batch.expected(soft_cap=0.7))


@pytest.mark.parametrize("window", [None, 3, 20])
def test_spans_of_a_long_prompt(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting queries into spans changes nothing; here the spans are a few queries long."""
    monkeypatch.setattr(reference_plan, "_SPAN", 5)
    monkeypatch.setattr(reference_plan, "_CAUSAL_SPAN", 8)
    batch = make_batch([(41, 41), (23, 37), (1, 12)], block_size=4)
    assert_close("attention", batch.attend(window=window), batch.expected(window))


def test_a_decode_batch_of_very_different_lengths() -> None:
    """The gather is bucketed by length: no sequence is padded to the longest."""
    lengths = [(1, 3), (1, 3000), (1, 5), (1, 2900), (1, 40), (1, 1)]
    batch = make_batch(lengths, heads=(2, 1, 4), block_size=16)
    layout = ops.KVLayout(1, 16, None, batch.q.device)
    plan = ops.plan_batch(
        layout, *(a.numpy() for a in (batch.block_tables, batch.context_lens, batch.query_start)), np.empty(0)
    )
    assert [bucket.hidden.shape[0] for bucket in plan.buckets] == [2, 4]
    gathered = sum(bucket.rows.numel() for bucket in plan.buckets)
    assert gathered <= 1.05 * sum(-(-context // 16) for _, context in lengths)
    assert_close("attention", batch.attend(), batch.expected())


def test_the_size_of_one_gather_is_bounded() -> None:
    contexts = np.full(64, 4096)
    layout = ops.KVLayout(8, 16, None, torch.device("cpu"))
    tables = np.zeros((64, 256), np.int32)
    plan = ops.plan_batch(layout, tables, contexts, np.arange(65), np.empty(0))
    assert len(plan.buckets) == 16
    assert all(bucket.rows.numel() * 16 <= 2**17 for bucket in plan.buckets)


def test_a_window_gathers_only_the_blocks_it_shows() -> None:
    layout = ops.KVLayout(1, 16, 32, torch.device("cpu"))
    tables = np.arange(256, dtype=np.int32)[None]
    plan = ops.plan_batch(layout, tables, np.array([4090]), np.array([0, 1]), np.empty(0))
    assert plan.buckets[0].rows.tolist() == [253, 254, 255]
    plan = ops.plan_batch(layout, tables, np.array([4090]), np.array([0, 10]), np.empty(0))
    assert plan.spans[0].rows.tolist() == [253, 254, 255]  # the first query's window begins at token 4049


def test_a_sequence_does_not_depend_on_the_others() -> None:
    batch = make_batch(MIXED, block_size=4)
    together = batch.attend()
    for seq, (new, _) in enumerate(MIXED):
        begin = int(batch.query_start[seq])
        alone = ops.paged_attention(
            batch.q[begin : begin + new],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables[seq : seq + 1],
            batch.context_lens[seq : seq + 1],
            torch.tensor([0, new]),
            scale=SCALE,
        )
        assert_close(f"sequence {seq}", alone, together[begin : begin + new].double())


def test_block_addresses_beyond_32_bits() -> None:
    """Block 2**20 of 2**12 numbers lies beyond what 32 bits can count."""
    num_blocks, num_kv_heads, block_size, head_size = 2**20 + 1, 1, 64, 64
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    torch.use_deterministic_algorithms(False)  # 8 GiB of address space of which one block is touched
    cache = torch.empty(shape, dtype=torch.bfloat16)
    k = torch.randn(1, num_kv_heads, head_size).bfloat16()
    ops.kv_store(k, k, cache, cache, torch.tensor([2**20 * block_size + 5]))
    assert torch.equal(cache[2**20, :, 5], k[0])
    table = torch.full((1, 1), 2**20, dtype=torch.int32)
    cache[2**20, :, :5] = k
    ends = torch.tensor([6]), torch.tensor([0, 1])
    attended = ops.paged_attention(torch.randn_like(k), cache, cache, table, *ends, scale=1.0)
    assert_close("attention", attended, k)


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("planned", [True, False])
def test_kv_store(block_size: int, planned: bool) -> None:
    num_blocks, num_kv_heads, head_size, num_tokens = 11, 3, 6, 7
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_size), torch.nan) for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    wide = torch.randn(num_tokens, 2 * num_kv_heads + 1, head_size)
    new = wide[:, :num_kv_heads], wide[:, num_kv_heads + 1 :]
    plan = None
    if planned:
        layout = ops.KVLayout(num_kv_heads, block_size, None, torch.device("cpu"))
        tokens = np.arange(num_tokens + 1), slots.numpy()
        plan = ops.plan_batch(layout, np.zeros((num_tokens, 1)), np.ones(num_tokens, int), *tokens)
    ops.kv_store(*new, *caches, slots, plan)
    for name, cache, tokens in zip("kv", caches, new, strict=True):
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, block_size)
            assert torch.equal(cache[block, :, offset], tokens[token]), f"{name} of token {token}"
        written = num_tokens * num_kv_heads * head_size
        assert int((~cache.isnan()).sum()) == written, f"{name}: something else was written"
