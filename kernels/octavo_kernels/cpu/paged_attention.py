"""Native `ops.paged_attention`; see there for shapes."""

import ctypes

import torch
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.cpu.library import TYPES, cache_type, num_threads

# As attention.h has them.
_MAX_HEAD_SIZE = 256
_MAX_GROUP = 64
_LANES = 16


def takes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
) -> bool:
    return (
        takes_heads(q.shape[1], k_cache.shape[1], q.shape[2])
        and q.stride(2) == 1
        and q.dtype in TYPES
        and k_cache.dtype == v_cache.dtype
        and cache_type(k_cache, q.dtype) is not None
        and block_tables.dtype == context_lens.dtype == query_start.dtype == torch.int32
        and all(x.is_contiguous() for x in (k_cache, v_cache, block_tables, context_lens, query_start))
    )


def takes_heads(num_heads: int, num_kv_heads: int, head_size: int) -> bool:
    return head_size % _LANES == 0 and head_size <= _MAX_HEAD_SIZE and num_heads <= _MAX_GROUP * num_kv_heads


def paged_attention(
    lib: ctypes.CDLL,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    num_tokens, num_heads, head_size = q.shape
    out = q.new_empty((num_tokens, num_heads, head_size))
    sequences, table_width = block_tables.shape
    failed = lib.octavo_paged_attention(
        q.data_ptr(),
        out.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        context_lens.data_ptr(),
        query_start.data_ptr(),
        q.stride(0),
        q.stride(1),
        table_width,
        sequences,
        num_heads,
        k_cache.shape[1],
        kv_format.block_size(k_cache, head_size),
        head_size,
        window or 0,
        scale,
        soft_cap or 0.0,
        TYPES[q.dtype],
        cache_type(k_cache, q.dtype),
        num_threads(),
    )
    if failed:
        raise MemoryError("no memory for attention's list of tasks")
    return out
