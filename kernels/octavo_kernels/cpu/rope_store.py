"""Native `ops.rope_and_store`; see there for shapes."""

import ctypes

import torch
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.cpu.library import TYPES, cache_type, num_threads

_LARGEST_HEAD = 1024  # of the buffers in csrc/rope_store.c


def takes(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> bool:
    return (
        k_cache.dtype == v_cache.dtype
        and cache_type(k_cache, qkv.dtype) is not None
        and cos.dtype == sin.dtype == torch.float32
        and slot_mapping.dtype == torch.int64
        and qkv.shape[2] <= _LARGEST_HEAD
        and all(x.is_contiguous() for x in (qkv, cos, sin, k_cache, v_cache, slot_mapping))
    )


def rope_and_store(
    lib: ctypes.CDLL,
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    lib.octavo_rope_store(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        qkv.shape[0],
        num_heads,
        k_cache.shape[1],
        qkv.shape[2],
        kv_format.block_size(k_cache, qkv.shape[2]),
        TYPES[qkv.dtype],
        cache_type(k_cache, qkv.dtype),
        num_threads(),
    )
    return qkv[:, :num_heads]
