"""Attention of sequences with several new tokens, over those and what is cached before them: it waits for
products. A program has a tile of consecutive tokens of one sequence, with the query heads of one KV head.
"""

import triton
import triton.language as tl

from octavo_kernels.gpu.attention_tiles import (
    CAUSAL,
    NOTHING,
    cache_of_head,
    empty_state,
    first_key,
    over_keys,
)


@triton.jit
def _sequence_of(p_query_start, i_tile, num_sequences, TOKENS: tl.constexpr):
    """The last sequence whose tiles begin at or before `i_tile`. Sequence s has its first tile at
    `query_start[s] // TOKENS + s`, which leaves each as many as it can need.

    Counted rather than searched for: a search would be log2(S) loads that wait for one another.
    """
    o_some = tl.arange(0, 128)
    b_count = tl.zeros([128], tl.int32)
    for i_some in range(0, num_sequences, 128):
        o_seq = i_some + o_some
        b_start = tl.load(p_query_start + o_seq, mask=o_seq < num_sequences, other=0)
        b_count += ((o_seq < num_sequences) & (b_start // TOKENS + o_seq <= i_tile)).to(tl.int32)
    return tl.sum(b_count, 0) - 1


@triton.jit(do_not_specialize=["num_sequences", "stride_table"])
def prefill(
    p_q,  # as in `decode`
    p_k,
    p_v,
    p_k_scales,
    p_v_scales,
    p_out,  # [T, Hq, D]
    p_block_tables,
    p_context_lens,
    p_query_start,
    unit,
    soft_cap,
    stride_q_token,
    stride_q_head,
    stride_table,
    num_kv_heads,
    num_sequences,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Grid (Hkv, tiles). The last tiles come first: later tokens of a prompt have more keys."""
    i_head = tl.program_id(0)
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i_seq = _sequence_of(p_query_start, i_tile, num_sequences, TOKENS)
    start = tl.load(p_query_start + i_seq)
    stop = tl.load(p_query_start + i_seq + 1)
    token = start + (i_tile - start // TOKENS - i_seq) * TOKENS
    if (token >= stop) | (stop - start == 1):
        return
    to_position = tl.load(p_context_lens + i_seq) - stop  # what a token's row is short of its position

    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, D_PADDED)
    o_token = token + o_row // GROUP
    head = i_head * GROUP + o_row % GROUP
    mask = ((o_row < TOKENS * GROUP) & (o_token < stop))[:, None] & (o_dim < D)[None, :]
    p_row = p_q + o_token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(p_row[:, None] + o_dim[None, :], mask=mask, other=0.0).to(TYPE)
    cache = cache_of_head(p_k, p_v, p_k_scales, p_v_scales, i_head, num_kv_heads, BLOCK, D, KIND)
    p_table = p_block_tables + i_seq.to(tl.int64) * stride_table
    position = to_position + o_token
    state = empty_state(ROWS, D_PADDED)

    # All rows see keys [full, part) of whole tiles, which need no mask; some see [part, limit), and with a
    # window [begin, full).
    limit = to_position + tl.minimum(token + TOKENS, stop)
    first = first_key(to_position + token + 1, WINDOW)
    full = 0
    if WINDOW > 0:
        begin = first // KEYS * KEYS
        full = tl.minimum(tl.cdiv(tl.maximum(limit - WINDOW, 0), KEYS) * KEYS, limit)
        state = over_keys(
            b_q, state, cache, p_table, begin, full, first, limit, position, unit, soft_cap,
            KEYS, BLOCK, D, D_PADDED, WINDOW, CAPPED, KIND, CAUSAL,
        )  # fmt: skip
    part = tl.maximum((to_position + token + 1) // KEYS * KEYS, full)
    state = over_keys(
        b_q, state, cache, p_table, full, part, first, limit, position, unit, soft_cap,
        KEYS, BLOCK, D, D_PADDED, WINDOW, CAPPED, KIND, NOTHING,
    )  # fmt: skip
    state = over_keys(
        b_q, state, cache, p_table, part, limit, first, limit, position, unit, soft_cap,
        KEYS, BLOCK, D, D_PADDED, WINDOW, CAPPED, KIND, CAUSAL,
    )  # fmt: skip
    _, b_sum, b_acc = state
    o_out = o_token.to(tl.int64) * (num_kv_heads * GROUP) + head
    b_out = (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_out[:, None] * D + o_dim[None, :], b_out, mask=mask)
