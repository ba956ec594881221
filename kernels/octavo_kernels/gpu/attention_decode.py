"""Attention of sequences with one new token, which waits for memory.

A program has a share of one sequence's keys, of one KV head. Where sequences alone are too few for the GPU,
the keys of each are split into several shares, which `combine` puts together (FlashDecoding, arXiv
2311.01282).
"""

import triton
import triton.language as tl

from octavo_kernels.gpu.attention_tiles import (
    KEYS_OUTSIDE,
    cache_of_head,
    empty_state,
    first_key,
    over_keys,
)


@triton.jit
def _share(keys, splits, KEYS: tl.constexpr):
    """Keys of a split: whole tiles, two at least."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), KEYS), 2) * KEYS


# A table's width differs from step to step: the kernel would be compiled anew where it is a multiple of 16.
@triton.jit(do_not_specialize=["splits", "stride_table"])
def decode(
    p_q,  # [T, Hq, D], strides given
    p_k,  # as `ops` has them; of int32 where they are quantised
    p_v,
    p_k_scales,  # the same memory as bfloat16
    p_v_scales,
    p_out,  # [T, Hq, D]; where keys are split, [S, Hq, splits, D] float32
    p_lse,  # [S, Hq, splits] float32, where keys are split: log2 of the sum of a split's weights
    p_block_tables,
    p_context_lens,
    p_query_start,
    unit,
    soft_cap,
    stride_q_token,
    stride_q_head,
    stride_table,
    num_kv_heads,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    SPLIT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Grid (Hkv, splits, S): programs that run side by side read the heads of a block, which lie together."""
    i_head, i_split, i_seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, next_token = tl.load(p_query_start + i_seq), tl.load(p_query_start + i_seq + 1)
    end = tl.load(p_context_lens + i_seq)
    if next_token != token + 1:
        return
    first = first_key(end, WINDOW)
    begin = first // KEYS * KEYS
    if SPLIT:
        share = _share(end - begin, splits, KEYS)
        begin += i_split * share
        if begin >= end:
            return
        end = tl.minimum(begin + share, end)

    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, D_PADDED)
    head = i_head * GROUP + o_row
    mask = (o_row < GROUP)[:, None] & (o_dim < D)[None, :]
    p_row = p_q + token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(p_row[:, None] + o_dim[None, :], mask=mask, other=0.0).to(TYPE)
    cache = cache_of_head(p_k, p_v, p_k_scales, p_v_scales, i_head, num_kv_heads, BLOCK, D, KIND)
    p_table = p_block_tables + i_seq * stride_table
    state = empty_state(ROWS, D_PADDED)
    state = over_keys(
        b_q, state, cache, p_table, begin, end, first, end, 0, unit, soft_cap,
        KEYS, BLOCK, D, D_PADDED, WINDOW, CAPPED, KIND, KEYS_OUTSIDE,
    )  # fmt: skip
    b_max, b_sum, b_acc = state
    # A padded sequence has no keys, and zeros for its result.
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    if SPLIT:
        o_out = (i_seq * (num_kv_heads * GROUP) + head) * splits + i_split
        tl.store(p_lse + o_out, b_max + tl.log2(b_sum), mask=o_row < GROUP)
    else:
        o_out = token.to(tl.int64) * (num_kv_heads * GROUP) + head
    tl.store(p_out + o_out[:, None] * D + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def combine(
    p_parts,  # [S, Hq, splits, D] float32
    p_lse,  # [S, Hq, splits] float32
    p_out,  # [T, Hq, D]
    p_context_lens,
    p_query_start,
    splits,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (Hq, S). Splits without a key were not written, and are not read."""
    i_head, i_seq, num_heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    token = tl.load(p_query_start + i_seq)
    if tl.load(p_query_start + i_seq + 1) != token + 1:
        return
    context_len = tl.load(p_context_lens + i_seq)
    keys = context_len - first_key(context_len, WINDOW) // KEYS * KEYS
    used = tl.cdiv(keys, _share(keys, splits, KEYS))

    o_dim = tl.arange(0, D_PADDED)
    o_split = tl.arange(0, 16)
    o_row = (i_seq * num_heads + i_head) * splits
    b_max = tl.full([16], float("-inf"), tl.float32)
    b_sum = tl.zeros([16], tl.float32)
    b_acc = tl.zeros([16, D_PADDED], tl.float32)
    for i_split in range(0, used, 16):
        is_used = i_split + o_split < used
        o_part = o_row + i_split + o_split
        mask = is_used[:, None] & (o_dim < D)[None, :]
        b_lse = tl.load(p_lse + o_part, mask=is_used, other=float("-inf"))
        b_part = tl.load(p_parts + o_part[:, None] * D + o_dim[None, :], mask=mask, other=0.0)
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shrink = tl.exp2(b_max - b_new)
        b_weight = tl.exp2(b_lse - b_new)
        b_sum = b_sum * b_shrink + b_weight
        b_acc = b_acc * b_shrink[:, None] + b_part * b_weight[:, None]
        b_max = b_new
    total = tl.sum(b_sum, 0)
    b_out = tl.sum(b_acc, 0) / tl.where(total == 0.0, 1.0, total)
    p_row = p_out + (token.to(tl.int64) * num_heads + i_head) * D
    tl.store(p_row + o_dim, b_out.to(p_out.dtype.element_ty), mask=o_dim < D)
