"""What the reference kernels gather and where they write, worked out once a step and shared by all layers.

Sequences with one new token (decode) are put into buckets of similar length, which are computed together.
Sequences with several new tokens are cut into spans of queries, which are computed one by one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# A bucket may waste a quarter of its gather on padding, and so many tokens more; beyond that a bucket of its
# own (about 0.1 ms of dispatch on a CPU) is cheaper.
_PADDING_SHARE = 4
_PADDING_TOKENS = 1024
# Tokens x KV heads gathered at once: bounds the memory, and keeps the gather in the cache.
_BUCKET_ROWS = 2**17
# Queries at once where a mask is needed, and where the plain causal one does (which skips what it hides).
_SPAN = 256
_CAUSAL_SPAN = 2048


@dataclass(frozen=True)
class KVLayout:
    """A KV cache of one layer, [N, Hkv, B, D] for K and for V. Block b, head h is row `b * Hkv + h` of the
    cache seen as [N * Hkv, B * D]."""

    num_kv_heads: int
    block_size: int
    window: int | None
    device: torch.device

    def rows(self, blocks: Ints) -> Tensor:
        """Rows of all heads of blocks [..., M]: [... * Hkv * M] int64."""
        heads = np.arange(self.num_kv_heads)[:, None]
        return self.tensor((blocks[..., None, :] * self.num_kv_heads + heads).reshape(-1))

    def tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


@dataclass(frozen=True)
class Bucket:
    """S sequences with one new token each, and L = M x B slots gathered for each of them."""

    queries: Tensor | None  # [S] rows of q; None when they are all its rows, in order
    rows: Tensor  # [S * Hkv * M] rows of the cache
    hidden: Tensor  # [S, 1, 1, L] bool: the slots that hold no key the query sees
    hidden_rows: Tensor  # the same slots for every head, as rows of the gather seen as [S * Hkv * L, D]


@dataclass(frozen=True)
class Span:
    """Queries [begin, end) of one sequence, and the keys that any of them sees."""

    begin: int
    end: int
    rows: Tensor  # [Hkv * M] rows of the cache
    first_key: int  # of the M x B gathered
    num_keys: int
    offset: int  # the first query's own key, counted from `first_key`
    window: int | None  # None when it hides nothing here

    @property
    def causal(self) -> bool:
        """Whether the plain causal mask is the right one: as many queries as keys."""
        return self.offset == 0 and self.window is None

    def visible(self) -> Tensor:
        """[end - begin, num_keys] bool: which keys each query sees."""
        shape = (self.end - self.begin, self.num_keys)
        mask = torch.ones(shape, dtype=torch.bool, device=self.rows.device).tril_(self.offset)
        return mask if self.window is None else mask.triu_(self.offset - self.window + 1)


@dataclass(frozen=True)
class BatchPlan:
    """Everything that the kernels of one KV group need to know of a batch: its integers, as `ops` has them,
    and what the reference makes of them when it is first asked for."""

    layout: KVLayout
    block_tables: NDArray[np.integer[Any]]
    context_lens: NDArray[np.integer[Any]]
    query_start: NDArray[np.integer[Any]]
    slot_mapping: NDArray[np.integer[Any]]

    @cached_property
    def num_single(self) -> int:
        """Sequences with one new token."""
        return int((np.diff(self.query_start) == 1).sum())

    @cached_property
    def longest_query(self) -> int:
        """New tokens of the sequence that has most."""
        return int(np.diff(self.query_start).max(initial=0))

    @cached_property
    def longest_context(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.context_lens.max(initial=0))

    @cached_property
    def slot_rows(self) -> Tensor:
        """[T * Hkv] where `kv_store` writes, as rows of the cache seen as [N * Hkv * B, D]."""
        return slot_rows(self.layout, np.asarray(self.slot_mapping, np.int64))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._parts[0]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[tuple[Bucket, ...], tuple[Span, ...]]:
        wide = (np.asarray(a, np.int64) for a in (self.block_tables, self.context_lens, self.query_start))
        return _parts(self.layout, *wide)


def _parts(
    layout: KVLayout, block_tables: Ints, context_lens: Ints, query_start: Ints
) -> tuple[tuple[Bucket, ...], tuple[Span, ...]]:
    counts = np.diff(query_start)
    single = np.flatnonzero(counts == 1)
    window = layout.window
    first_blocks = np.zeros_like(context_lens)
    if window is not None:
        first_blocks = np.maximum(context_lens - window, 0) // layout.block_size
    num_blocks = -(-context_lens // layout.block_size) - first_blocks
    buckets = []
    for members in _similar(num_blocks[single], layout):
        seqs = single[members]
        in_order = len(seqs) == query_start[-1]
        queries = None if in_order else layout.tensor(query_start[seqs])
        width = int(num_blocks[seqs].max())
        buckets.append(
            _bucket(layout, queries, block_tables[seqs], context_lens[seqs], first_blocks[seqs], width)
        )
    spans: list[Span] = []
    for seq in np.flatnonzero(counts > 1):
        begin, end = int(query_start[seq]), int(query_start[seq + 1])
        spans.extend(_spans(layout, begin, end, int(context_lens[seq]), block_tables[seq]))
    return tuple(buckets), tuple(spans)


def slot_rows(layout: KVLayout, slot_mapping: Ints) -> Tensor:
    """[T * Hkv] int64: rows of the cache seen as [N * Hkv * B, D] in which the tokens' heads lie."""
    blocks, offsets = np.divmod(slot_mapping[:, None], layout.block_size)
    rows = (blocks * layout.num_kv_heads + np.arange(layout.num_kv_heads)) * layout.block_size + offsets
    return layout.tensor(rows.reshape(-1))


def _similar(num_blocks: Ints, layout: KVLayout) -> list[Ints]:
    """Divides sequences of so many blocks each into groups of similar length; returns their indices."""
    order = np.argsort(-num_blocks, kind="stable")
    groups = []
    while len(order):
        used = np.cumsum(num_blocks[order])
        gathered = num_blocks[order[0]] * np.arange(1, len(order) + 1)
        fits = gathered - used <= used // _PADDING_SHARE + _PADDING_TOKENS // layout.block_size
        fits &= gathered * layout.block_size * layout.num_kv_heads <= _BUCKET_ROWS
        size = len(order) if fits.all() else max(1, int(fits.argmin()))
        groups.append(np.sort(order[:size]))
        order = order[size:]
    return groups


def _bucket(
    layout: KVLayout,
    queries: Tensor | None,
    block_tables: Ints,
    context_lens: Ints,
    first_blocks: Ints,
    width: int,
) -> Bucket:
    columns = first_blocks[:, None] + np.arange(width)  # [S, M]
    filled = columns * layout.block_size < context_lens[:, None]
    blocks = np.take_along_axis(block_tables, np.where(filled, columns, 0), axis=1)
    length = width * layout.block_size
    first_slots = first_blocks * layout.block_size
    seq, slot = _ranges(context_lens - first_slots, np.full_like(context_lens, length))
    if layout.window is not None:  # it may begin inside the first block
        begins = np.maximum(context_lens - layout.window - first_slots, 0)
        older = _ranges(np.zeros_like(begins), begins)
        seq, slot = np.concatenate((older[0], seq)), np.concatenate((older[1], slot))
    hidden = np.zeros((len(context_lens), length), np.bool_)
    hidden[seq, slot] = True
    heads = seq[:, None] * layout.num_kv_heads + np.arange(layout.num_kv_heads)
    return Bucket(
        queries=queries,
        rows=layout.rows(blocks),
        hidden=layout.tensor(hidden[:, None, None]),
        hidden_rows=layout.tensor((heads * length + slot[:, None]).reshape(-1)),
    )


def _ranges(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """All the numbers in [begins[i], ends[i]) for all i: the i of each, and the number."""
    counts = ends - begins
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) + np.repeat(begins - np.cumsum(counts) + counts, counts)


def _spans(layout: KVLayout, begin: int, end: int, context_len: int, block_table: Ints) -> list[Span]:
    window, block_size = layout.window, layout.block_size
    spans = []
    position = context_len - (end - begin)
    while begin < end:
        size = _SPAN
        if position == 0:
            size = _CAUSAL_SPAN if window is None else min(_CAUSAL_SPAN, window)
        size = min(size, end - begin)
        stop = position + size
        start = 0 if window is None else max(0, position - window + 1)
        first_block = start // block_size
        spans.append(
            Span(
                begin=begin,
                end=begin + size,
                rows=layout.rows(block_table[first_block : -(-stop // block_size)]),
                first_key=start - first_block * block_size,
                num_keys=stop - start,
                offset=position - start,
                window=None if window is None or stop <= window else window,
            )
        )
        begin, position = begin + size, stop
    return spans
