"""Ragged batches over a paged cache in which every slot that holds no key is a NaN, and attention over them
worked out in float64, the plain way."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import kv_format, ops

SCALE = 0.3


@dataclass
class Batch:
    """Keys and values lie in blocks in random order."""

    q: Tensor  # [T, Hq, D]
    keys: list[Tensor]  # per sequence [context, Hkv, D], as the cache has them
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor
    slot_mapping: Tensor

    def attend(self, planned: bool = False, **options: float | None) -> Tensor:
        """`options`: `window` and `soft_cap`."""
        plan = self.plan(options.get("window")) if planned else None  # type: ignore[arg-type]
        return ops.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.query_start,
            scale=SCALE,
            plan=plan,
            **options,  # type: ignore[arg-type]
        )

    def plan(self, window: int | None = None) -> ops.BatchPlan:
        block_size = kv_format.block_size(self.k_cache, self.q.shape[2])
        layout = ops.KVLayout(self.k_cache.shape[1], block_size, window, self.q.device)
        integers = self.block_tables, self.context_lens, self.query_start, self.slot_mapping
        return ops.plan_batch(layout, *(tensor.numpy() for tensor in integers))

    def expected(self, window: int | None = None, soft_cap: float | None = None) -> Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        groups = self.q.shape[1] // self.k_cache.shape[1]
        for seq, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            begin, end = int(self.query_start[seq]), int(self.query_start[seq + 1])
            if len(k) == 0:  # padding
                continue
            by_head = (x.double().repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
            k_heads, v_heads = by_head  # [Hq, context, D]
            scores = self.q[begin:end].double().transpose(0, 1) @ k_heads.transpose(1, 2) * SCALE
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            own = torch.arange(len(k) - (end - begin), len(k))[:, None]
            other = torch.arange(len(k))
            hidden = other > own
            if window is not None:
                hidden |= other <= own - window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[begin:end] = (weights @ v_heads).transpose(0, 1)
        return out


def make_batch(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int] = (6, 2, 16),
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> Batch:
    """`lengths`: (new tokens, context) of each sequence; `heads`: Hq, Hkv, D; `cache`: None for `dtype`."""
    num_heads, num_kv_heads, head_size = heads
    cache = cache or dtype
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), max(counts) + 2), 2**31 - 1, dtype=torch.int32)  # unused: anything
    shape = num_blocks, *kv_format.block_shape(num_kv_heads, block_size, head_size, cache)
    k_cache, v_cache = (_poisoned(shape, cache) for _ in range(2))
    keys, values, slots = [], [], []
    for seq, (new, context) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(counts[seq])], dtype=torch.int64)
        tables[seq, : counts[seq]] = blocks
        positions = torch.arange(context)
        where, offsets = blocks[positions // block_size], positions % block_size
        for to, kept in ((k_cache, keys), (v_cache, values)):
            x = torch.randn(context, num_kv_heads, head_size).to(dtype)
            if kv_format.is_quantised(cache):
                tiles = where[:, None] * num_kv_heads + torch.arange(num_kv_heads)
                rows = (tiles * block_size + offsets[:, None]).reshape(-1)
                kv_format.store(x.flatten(0, 1), to, rows)
                numbers, scales = kv_format.quantise(x.flatten(0, 1), cache)
                x = (numbers.float() * scales.float()).view(x.shape)
            else:
                to[where, :, offsets] = x
            kept.append(x)
        slots.append((where * block_size + offsets)[context - new :] if context else torch.zeros(new).long())
    query_start = torch.tensor([0, *np.cumsum([new for new, _ in lengths])], dtype=torch.int32)
    wide = torch.randn(int(query_start[-1]), num_heads + num_kv_heads, head_size).to(dtype)
    context_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return Batch(
        q=wide[:, :num_heads],  # strided, as it is in a model
        keys=keys,
        values=values,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        context_lens=context_lens,
        query_start=query_start,
        slot_mapping=torch.cat(slots),
    )


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if kv_format.is_quantised(dtype):  # whose scales, of bytes of ones, are NaNs
        return torch.full(shape, 255, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)
