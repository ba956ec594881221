"""What the two attention kernels share: tiles of a paged cache, and the softmax that runs along them.

Quantised numbers are read as words of four. They become numbers of q's type in registers and pass through
shared memory as such, since 8-bit values cannot be turned on their way from there to a product.
"""

import triton
import triton.language as tl

# What a cache holds, and what of a tile of scores is hidden.
PLAIN, INT8, FP8 = (tl.constexpr(kind) for kind in range(3))
NOTHING, KEYS_OUTSIDE, CAUSAL = (tl.constexpr(mask) for mask in range(3))


@triton.jit
def _block_ids(p_table, i_key, limit, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of keys [i_key, i_key + KEYS) as far as they are below `limit`: [KEYS], or one for all."""
    o_key = i_key if BLOCK >= KEYS else i_key + tl.arange(0, KEYS)
    return tl.load(p_table + o_key // BLOCK, mask=o_key < limit, other=0)


@triton.jit
def _load(
    cache,
    b_block,
    i_key,
    first,
    limit,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys and values of [i_key, i_key + KEYS) as they lie in the cache, [KEYS, D_PADDED] or as many words of
    four, and their scales [KEYS] where it is quantised. Masked, those outside [first, limit) are zeros."""
    p_k, p_v, p_k_scales, p_v_scales, stride_block = cache
    WORD: tl.constexpr = 1 if KIND == PLAIN else 4
    o_in_tile = tl.arange(0, KEYS)
    o_key = i_key + o_in_tile
    o_word = tl.arange(0, D_PADDED // WORD)[None, :]
    o_slot = (i_key % BLOCK if BLOCK >= KEYS else 0) + o_in_tile % BLOCK
    o_block = b_block.to(tl.int64) * stride_block
    o_kv = (o_block // WORD + o_slot * (D // WORD))[:, None] + o_word
    exists = (o_key >= first) & (o_key < limit)
    if MASKED or D != D_PADDED:
        if D == D_PADDED:
            mask = exists[:, None]
        elif MASKED:
            mask = exists[:, None] & (o_word < D // WORD)
        else:
            mask = o_word < D // WORD
        b_k = tl.load(p_k + o_kv, mask=mask, other=0)
        b_v = tl.load(p_v + o_kv, mask=mask, other=0)
    else:
        b_k = tl.load(p_k + o_kv)
        b_v = tl.load(p_v + o_kv)
    b_k_scale, b_v_scale = 1.0, 1.0
    if KIND != PLAIN:
        o_scale = o_block // 2 + (BLOCK * D // 2 + o_slot)
        b_k_scale = tl.load(p_k_scales + o_scale, mask=exists, other=0)
        b_v_scale = tl.load(p_v_scales + o_scale, mask=exists, other=0)
    return b_k, b_v, b_k_scale, b_v_scale


@triton.jit
def _byte(b_words, i_byte: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr):
    """One of the four numbers in each word. Compute capability 80 has no fp8, so it is decoded by hand."""
    b_byte = (b_words >> (8 * i_byte)) & 0xFF
    if KIND == INT8:
        # The number + 128 in the last bits of 2^23, from where on float32 has just the integers.
        b_number = ((b_byte ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        # Sign, exponent and mantissa in their places in a float32, which is then too small by 2^120. What
        # would be a NaN becomes a number: `kv_format` writes none.
        b_places = ((b_byte & 0x80) << 24) | ((b_byte & 0x7F) << 20)
        b_number = b_places.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return b_number.to(TYPE)


@triton.jit
def _numbers(b_loaded, KIND: tl.constexpr, TYPE: tl.constexpr):
    """[KEYS, D_PADDED] of the type that is multiplied."""
    if KIND == PLAIN:
        b_numbers = b_loaded.to(TYPE)
    else:
        b_even = tl.join(_byte(b_loaded, 0, KIND, TYPE), _byte(b_loaded, 2, KIND, TYPE))
        b_odd = tl.join(_byte(b_loaded, 1, KIND, TYPE), _byte(b_loaded, 3, KIND, TYPE))
        b_numbers = tl.reshape(tl.join(b_even, b_odd), [b_loaded.shape[0], b_loaded.shape[1] * 4])
    return b_numbers


@triton.jit
def over_keys(
    b_q,
    state,  # of each row: maximum, sum of weights, sum of weighted values
    cache,
    p_table,
    begin,
    end,
    first,
    limit,
    position,
    unit,
    soft_cap,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds tiles of keys in [begin, end), begin being a multiple of KEYS; `limit` is where the last ends that
    may be read. `unit`: what a product q k is multiplied by to be an exponent of two; `soft_cap`: of such a
    product, not of the scaled score.

    The pipeline of Triton's compiler fetches what a product takes some tiles ahead, but an address that is
    itself loaded would make it wait; so the blocks of the next tile are loaded a turn before. It holds what
    it fetches in shared memory, which quantised numbers have no use for: those are held in registers.
    """
    b_max, b_sum, b_acc = state
    AHEAD: tl.constexpr = 0 if KIND == PLAIN else KEYS
    MASKED: tl.constexpr = KIND != PLAIN or MASK != NOTHING
    b_block = _block_ids(p_table, begin, limit, KEYS, BLOCK)
    if AHEAD:
        b_next = _load(cache, b_block, begin, first, limit, KEYS, BLOCK, D, D_PADDED, KIND, MASKED)
        b_block = _block_ids(p_table, begin + KEYS, limit, KEYS, BLOCK)
    for i_key in range(begin, end, KEYS):
        b_loaded = _load(cache, b_block, i_key + AHEAD, first, limit, KEYS, BLOCK, D, D_PADDED, KIND, MASKED)
        b_block = _block_ids(p_table, i_key + AHEAD + KEYS, limit, KEYS, BLOCK)
        if AHEAD:
            b_k, b_v, b_k_scale, b_v_scale = b_next
            b_next = b_loaded
        else:
            b_k, b_v, b_k_scale, b_v_scale = b_loaded

        b_score = tl.dot(b_q, tl.trans(_numbers(b_k, KIND, b_q.dtype)), input_precision="tf32x3")
        if KIND != PLAIN:
            b_score *= b_k_scale.to(tl.float32)[None, :]
        if CAPPED:
            b_score = soft_cap * (2.0 * tl.sigmoid(b_score * (2.0 / soft_cap)) - 1.0)
        o_key = i_key + tl.arange(0, KEYS)
        if MASK == KEYS_OUTSIDE:
            b_score = tl.where(((o_key >= first) & (o_key < limit))[None, :], b_score, float("-inf"))
        elif MASK == CAUSAL:
            visible = o_key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (o_key[None, :] > position[:, None] - WINDOW)
            b_score = tl.where(visible, b_score, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_score, 1) * unit)
        # A row that has seen no key yet has a maximum of minus infinity: its weights are zeros.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_score * unit - b_base[:, None])
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_weight, 1)
        if KIND != PLAIN:
            b_weight *= b_v_scale.to(tl.float32)[None, :]
        b_acc = b_acc * b_shrink[:, None]
        b_value = _numbers(b_v, KIND, b_q.dtype)
        b_acc = tl.dot(b_weight.to(b_q.dtype), b_value, b_acc, input_precision="tf32x3")
        b_max = b_new
    return b_max, b_sum, b_acc


@triton.jit
def cache_of_head(
    p_k,
    p_v,
    p_k_scales,
    p_v_scales,
    i_head,
    num_kv_heads,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
):
    """Where a KV head's part of block 0 lies, and how far blocks are apart, in numbers or bytes."""
    TILE: tl.constexpr = BLOCK * D if KIND == PLAIN else BLOCK * (D + 2)
    WORD: tl.constexpr = 1 if KIND == PLAIN else 4
    o_words = i_head * (TILE // WORD)
    o_scales = i_head * (TILE // 2)
    return p_k + o_words, p_v + o_words, p_k_scales + o_scales, p_v_scales + o_scales, num_kv_heads * TILE


@triton.jit
def empty_state(ROWS: tl.constexpr, D_PADDED: tl.constexpr):
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    return b_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D_PADDED], tl.float32)


@triton.jit
def first_key(context_len, WINDOW: tl.constexpr):
    """That the last of so many tokens sees."""
    return tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
