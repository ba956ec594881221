"""`ops.paged_attention` in the Triton language; see there for shapes and meaning.

Sequences with one new token go to `decode`, those with several to `prefill`. Both have the query heads that
share a KV head as rows of one product, so that K and V are read once, and run along the keys with a running
maximum (FlashAttention, arXiv 2205.14135), with exponentials to the base of two.

All that a launch depends on are integers of the host, and all that a program needs it reads from the batch's
device tensors: nothing waits for the device, and a captured graph replays rightly at other contexts.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.gpu import INTERPRETED, chips
from octavo_kernels.gpu.attention_decode import combine, decode
from octavo_kernels.gpu.attention_prefill import prefill
from octavo_kernels.gpu.attention_tiles import FP8, INT8, PLAIN
from octavo_kernels.gpu.compiled import Form
from octavo_kernels.reference.plan import BatchPlan

BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_HEAD_SIZE = 256

_LOG2_E = 1.4426950408889634
# Programs that decoding is split into for each core, if there are keys enough: 3 run on it at a time, and
# after four rounds of them those that come last cost little.
_PROGRAMS_PER_CORE = 12
_LEAST_SHARE = 256  # keys that a program of its own pays for: the pipeline takes two tiles to fill
_MOST_SPLITS = 128

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    plan: BatchPlan | None,
) -> Tensor:
    """Without a plan, a batch of as many tokens as sequences is taken to be of single ones, and the block
    tables' width for the longest context. Context lengths of zero are padding, whose results are zeros.

    Raises ValueError for blocks or heads of a size that the kernels do not take.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k_cache.shape[1]
    num_sequences, table_width = block_tables.shape
    block_size = kv_format.block_size(k_cache, head_size)
    _check(head_size, block_size, k_cache.dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((num_tokens, num_heads, head_size), dtype=q.dtype, device=q.device)
    caches: tuple[Tensor, ...] = k_cache, v_cache, q, q
    if kv_format.is_quantised(k_cache.dtype):
        as_words = (c.view(torch.uint8).view(torch.int32) for c in (k_cache, v_cache))
        caches = *as_words, k_cache.view(torch.bfloat16), v_cache.view(torch.bfloat16)
    integers = block_tables, context_lens, query_start
    floats = scale * _LOG2_E, 1.0 if soft_cap is None else soft_cap / scale
    strides = q.stride(0), q.stride(1), block_tables.stride(0)
    meta = _constants(
        num_heads // num_kv_heads, block_size, head_size, window, soft_cap, k_cache.dtype, q.dtype
    )
    padded = meta["D_PADDED"]

    if plan is None:
        any_single, any_several = True, num_tokens != num_sequences
        longest = table_width * block_size
    else:
        any_single, any_several = plan.num_single > 0, plan.longest_query > 1
        longest = plan.longest_context
    if any_single:
        tile = chips.decode_tile(padded, k_cache.itemsize)
        meta |= {"ROWS": max(tile.rows, triton.next_power_of_2(meta["GROUP"])), "KEYS": tile.keys}
        seen = longest if window is None else min(longest, window + tile.keys)
        splits = _splits(num_sequences * num_kv_heads, seen, chips.num_cores(q.device))
        parts = lse = out
        if splits > 1:
            shape = num_sequences, num_heads, splits
            parts = torch.empty((*shape, head_size), dtype=torch.float32, device=q.device)
            lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        decode[(num_kv_heads, splits, num_sequences)](
            q, *caches, parts, lse, *integers, *floats, *strides, num_kv_heads, splits,
            **meta, SPLIT=splits > 1, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            combine[(num_heads, num_sequences)](
                parts, lse, out, context_lens, query_start, splits,
                KEYS=tile.keys, D=head_size, D_PADDED=padded, WINDOW=window or 0,
            )  # fmt: skip
    if any_several:
        tile = chips.prefill_tile(chips.capability(q.device), padded, k_cache.itemsize)
        rows = max(tile.rows, triton.next_power_of_2(meta["GROUP"]))
        tokens = rows // meta["GROUP"]
        meta |= {"TOKENS": tokens, "ROWS": rows, "KEYS": tile.keys}
        prefill[(num_kv_heads, num_tokens // tokens + num_sequences)](
            q, *caches, out, *integers, *floats, *strides, num_kv_heads, num_sequences,
            **meta, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _splits(programs: int, keys: int, cores: int) -> int:
    """Into how many shares the keys of each of so many programs are divided."""
    wanted = -(-cores * _PROGRAMS_PER_CORE // programs)
    return max(1, min(wanted, -(-keys // _LEAST_SHARE), _MOST_SPLITS))


def _check(head_size: int, block_size: int, cache: torch.dtype) -> None:
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"GPU kernels take blocks of {sizes} tokens, not of {block_size}")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"GPU kernels take heads of up to {MAX_HEAD_SIZE} numbers, not of {head_size}")
    if kv_format.is_quantised(cache) and head_size % 4:
        raise ValueError(
            f"GPU kernels take a quantised cache of heads of a multiple of 4, not of {head_size}"
        )


def _constants(
    group: int,
    block_size: int,
    head_size: int,
    window: int | None,
    soft_cap: float | None,
    cache: torch.dtype,
    compute: torch.dtype,
) -> dict[str, Any]:
    """What `decode` and `prefill` are both specialised by."""
    kinds = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
    return {
        "GROUP": group,
        "BLOCK": block_size,
        "D": head_size,
        "D_PADDED": max(16, triton.next_power_of_2(head_size)),
        "WINDOW": window or 0,
        "CAPPED": soft_cap is not None,
        "KIND": kinds.get(cache, PLAIN).value,
        # The interpreter multiplies bfloat16 wrongly.
        "TYPE": tl.float32 if INTERPRETED else _TYPES[compute],
    }


def forms(capability: int) -> Iterator[Form]:
    """Hot: Llama's heads, four to a KV head, in the head sizes and caches that models are served with."""
    for head_size in (64, 128, 256):
        for cache in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            yield from _forms(capability, head_size, cache)
    yield from _forms(capability, 128, torch.float16, group=1, compute=torch.float16, block_size=128)
    yield from _forms(capability, 80, torch.bfloat16, window=1000, soft_cap=50.0, hot=False)
    yield from _forms(capability, 128, torch.float32, compute=torch.float32, hot=False)
    types = {"p_parts": "*fp32:16", "p_lse": "*fp32:16", "p_out": "*bf16:16", "p_context_lens": "*i32:16"}
    types |= {"p_query_start": "*i32:16", "splits": "i32"}
    constants = {"KEYS": 64, "D": 128, "D_PADDED": 128, "WINDOW": 0}
    yield Form("combine 128", combine, types, constants, warps=4, stages=3)


def _forms(
    capability: int,
    head_size: int,
    cache: torch.dtype,
    group: int = 4,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    compute: torch.dtype = torch.bfloat16,
    hot: bool = True,
) -> Iterator[Form]:
    name = str(cache).removeprefix("torch.").removesuffix("_e4m3fn")
    number = str(_TYPES[compute])
    kept = "i32" if kv_format.is_quantised(cache) else number
    pointers = {"q": number, "k": kept, "v": kept, "k_scales": "bf16", "v_scales": "bf16", "lse": "fp32"}
    pointers |= dict.fromkeys(("block_tables", "context_lens", "query_start"), "i32")
    types = {f"p_{what}": f"*{type}:16" for what, type in pointers.items()}
    types |= {"unit": "fp32", "soft_cap": "fp32", "stride_q_token": "i32:16", "stride_q_head": "i32:16"}
    types |= dict.fromkeys(("stride_table", "num_kv_heads", "splits", "num_sequences"), "i32")
    constants = _constants(group, block_size, head_size, window, soft_cap, cache, compute)

    tile = chips.decode_tile(constants["D_PADDED"], cache.itemsize)
    kept_parts = types | {"p_out": "*fp32:16"}
    shape = {"ROWS": tile.rows, "KEYS": tile.keys, "SPLIT": True}
    yield Form(
        f"decode {name} {head_size}", decode, kept_parts, constants | shape, tile.warps, tile.stages, hot
    )
    tile = chips.prefill_tile(capability, constants["D_PADDED"], cache.itemsize)
    shape = {"ROWS": tile.rows, "TOKENS": tile.rows // group, "KEYS": tile.keys}
    types |= {"p_out": f"*{number}:16"}
    yield Form(f"prefill {name} {head_size}", prefill, types, constants | shape, tile.warps, tile.stages, hot)
