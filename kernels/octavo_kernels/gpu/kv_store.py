"""`ops.rope_and_store` and `ops.kv_store` in the Triton language; see `ops` for shapes.

A program has a few heads of one token: of its queries, or of its keys, or of its values. Every number is read
once and written once; a head lies in registers as two halves, so that rotating it moves nothing between
threads. Slots below 0 store nothing: those of the rows that pad a batch.

A quantised head is rounded as `kv_format.quantise` rounds: in integer arithmetic where that decides, so that
every chip, those without an 8-bit floating-point type included, stores the same bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.gpu.compiled import Form

# 2048 numbers of a head size of 128: two 16-byte loads of each thread of four warps, and as many stores. More
# heads a program would leave a decode step of few tokens to few programs.
_PROGRAM_NUMBERS = 2048
_WARPS = 4
# 1.5 * 2^23: a float32 that it is added to loses its fraction, ties to even.
_ROUND = tl.constexpr(12582912.0)
_LEAST_SCALE = tl.constexpr(1e-30)  # of kv_format


@triton.jit
def _rounded(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _bfloat16_bits(x):
    """Of float32 numbers, rounded to the nearest, ties to even. NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def _byte(x, FP8: tl.constexpr):
    """What a number within the type's range becomes, as an integer of which the low 8 bits count.

    e4m3 is a sign, four bits of exponent biased by 7, and three of mantissa; below 2^-6 there is no leading
    one.
    """
    if not FP8:
        return _rounded(x).to(tl.int32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = _rounded(magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _spread(low, high, o_number, HALF_BITS: tl.constexpr):
    """`kv_format.spread` of heads whose halves [heads, 2^HALF_BITS] are full: numbers whose places differ in
    one bit are added and subtracted, bit by bit; the highest tells the halves apart."""
    o_all = tl.broadcast_to(o_number, low.shape)
    low, high = low + high, low - high
    for i_bit in tl.static_range(HALF_BITS):
        sign = tl.where(((o_number >> i_bit) & 1) == 0, 1.0, -1.0)
        o_partner = o_all ^ (1 << i_bit)
        low = tl.gather(low, o_partner, 1) + sign * low
        high = tl.gather(high, o_partner, 1) + sign * high
    scale = 2.0 ** (-0.5 * (HALF_BITS + 1))
    return low * scale, high * scale


@triton.jit
def _largest(low, high):
    """Of each row [heads, 1]; a NaN, as an integer, is above all numbers."""
    low = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    high = high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.maximum(low, high), 1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _store(
    low,
    high,
    p_cache,
    slot,
    i_head,
    num_heads,
    block_size,
    o_number,
    is_head,
    is_low,
    is_high,
    SIZE: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Of one token's heads [heads, 1] the halves [heads, HALF], float32 already rounded to the batch's
    type."""
    HALF: tl.constexpr = (SIZE + 1) // 2
    block, place = slot // block_size, slot % block_size
    tile = block * num_heads + i_head  # int64, as slots are
    if QUANTISED:
        tile *= block_size * (SIZE + 2)
        scale = tl.div_rn(_largest(low, high), 448.0 if FP8 else 127.0)
        scale_bits = _bfloat16_bits(tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale))
        scale = (scale_bits << 16).to(tl.float32, bitcast=True)
        # Beside a NaN or an infinity there is no number to keep: the scale says so.
        low, high = tl.div_rn(low, scale), tl.div_rn(high, scale)
        low, high = tl.where(low == low, low, 0.0), tl.where(high == high, high, 0.0)
        low, high = _byte(low, FP8).to(tl.uint8), _byte(high, FP8).to(tl.uint8)
        p_scale = p_cache + tile + block_size * SIZE + place * 2
        tl.store(p_scale, (scale_bits & 0xFF).to(tl.uint8), mask=is_head)
        tl.store(p_scale + 1, (scale_bits >> 8).to(tl.uint8), mask=is_head)
    else:
        tile *= block_size * SIZE
    p_number = p_cache + tile + place * SIZE + o_number
    tl.store(p_number, low.to(p_cache.dtype.element_ty), mask=is_low)
    tl.store(p_number + HALF, high.to(p_cache.dtype.element_ty), mask=is_high)


@triton.jit
def _rope_and_store_kernel(
    p_qkv,
    p_cos,
    p_sin,
    p_k_cache,
    p_v_cache,
    p_slots,
    num_heads,
    num_kv_heads,
    block_size,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISED: tl.constexpr,
    SPREAD_BITS: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    query_parts = tl.cdiv(num_heads, BLOCK_HEADS)
    kv_parts = tl.cdiv(num_kv_heads, BLOCK_HEADS)
    part = tl.program_id(1)
    is_query = part < query_parts
    is_value = part >= query_parts + kv_parts
    part -= tl.where(is_query, 0, tl.where(is_value, query_parts + kv_parts, query_parts))
    count = tl.where(is_query, num_heads, num_kv_heads)
    first = tl.where(is_query, 0, num_heads + tl.where(is_value, num_kv_heads, 0))

    i_head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    o_number = tl.arange(0, BLOCK_HALF)[None, :]
    is_head = i_head < count
    mask = is_head & (o_number < HALF)
    p_low = p_qkv + (token * (num_heads + 2 * num_kv_heads) + first + i_head) * SIZE + o_number
    low = tl.load(p_low, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(p_low + HALF, mask=mask, other=0.0).to(tl.float32)
    if not is_value:
        o_angle = token * SIZE + o_number
        is_angle = o_number < HALF
        cos_low, cos_high = (
            tl.load(p_cos + o_angle, is_angle, 0.0),
            tl.load(p_cos + HALF + o_angle, is_angle, 0.0),
        )
        sin_low, sin_high = (
            tl.load(p_sin + o_angle, is_angle, 0.0),
            tl.load(p_sin + HALF + o_angle, is_angle, 0.0),
        )
        turned = low * cos_low + high * sin_low
        high = high * cos_high + low * sin_high
        low = turned
        if SPREAD_BITS is not None:
            low, high = _spread(low, high, o_number, SPREAD_BITS)
    if is_query:
        tl.store(p_low, low.to(p_qkv.dtype.element_ty), mask=mask)
        tl.store(p_low + HALF, high.to(p_qkv.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(p_slots + token)
        if slot >= 0:
            p_cache = p_v_cache if is_value else p_k_cache
            _store(
                low,
                high,
                p_cache,
                slot,
                i_head,
                num_kv_heads,
                block_size,
                o_number,
                is_head,
                mask,
                mask,
                SIZE,
                FP8,
                QUANTISED,
            )


@triton.jit
def _kv_store_kernel(
    p_k,
    p_v,
    p_k_cache,
    p_v_cache,
    p_slots,
    k_token_stride,
    k_head_stride,
    k_stride,
    v_token_stride,
    v_head_stride,
    v_stride,
    num_kv_heads,
    block_size,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    FP8: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    HALF: tl.constexpr = (SIZE + 1) // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token)
    if slot < 0:
        return
    is_value = tl.program_id(2) == 1
    i_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    o_number = tl.arange(0, BLOCK_HALF)[None, :]
    is_head = i_head < num_kv_heads
    is_low = is_head & (o_number < HALF)
    is_high = is_head & (o_number < SIZE - HALF)
    if is_value:
        p_low = p_v + token * v_token_stride + i_head.to(tl.int64) * v_head_stride + o_number * v_stride
        p_high = p_low + HALF * v_stride
    else:
        p_low = p_k + token * k_token_stride + i_head.to(tl.int64) * k_head_stride + o_number * k_stride
        p_high = p_low + HALF * k_stride
    low = tl.load(p_low, mask=is_low, other=0.0).to(tl.float32)
    high = tl.load(p_high, mask=is_high, other=0.0).to(tl.float32)
    p_cache = p_v_cache if is_value else p_k_cache
    _store(
        low,
        high,
        p_cache,
        slot,
        i_head,
        num_kv_heads,
        block_size,
        o_number,
        is_head,
        is_low,
        is_high,
        SIZE,
        FP8,
        QUANTISED,
    )


def rope_and_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """The rotated queries take the place of the others."""
    qkv, tokens, size = qkv.contiguous(), qkv.shape[0], qkv.shape[2]
    num_kv_heads = k_cache.shape[1]
    constants = _constants(size, k_cache.dtype)
    heads = constants["BLOCK_HEADS"]
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if tokens:
        _rope_and_store_kernel[tokens, parts](
            qkv,
            cos,
            sin,
            *_memory(k_cache, v_cache),
            slot_mapping,
            num_heads,
            num_kv_heads,
            kv_format.block_size(k_cache, size),
            **constants,
            SPREAD_BITS=_spread_bits(size, k_cache.dtype),
            num_warps=_WARPS,
        )
    return qkv[:, :num_heads]


def kv_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, num_kv_heads, size = k.shape
    constants = _constants(size, k_cache.dtype)
    if tokens:
        _kv_store_kernel[tokens, triton.cdiv(num_kv_heads, constants["BLOCK_HEADS"]), 2](
            k,
            v,
            *_memory(k_cache, v_cache),
            slot_mapping,
            *k.stride(),
            *v.stride(),
            num_kv_heads,
            kv_format.block_size(k_cache, size),
            **constants,
            num_warps=_WARPS,
        )


def _constants(size: int, cache_dtype: torch.dtype) -> dict[str, Any]:
    block_half = triton.next_power_of_2((size + 1) // 2)
    return {
        "SIZE": size,
        "BLOCK_HEADS": max(_PROGRAM_NUMBERS // (2 * block_half), 1),
        "BLOCK_HALF": block_half,
        "FP8": cache_dtype == torch.float8_e4m3fn,
        "QUANTISED": kv_format.is_quantised(cache_dtype),
    }


def _spread_bits(size: int, cache_dtype: torch.dtype) -> int | None:
    """Of places in half a head; None where nothing is spread."""
    spread = kv_format.is_quantised(cache_dtype) and kv_format.spreads(size)
    return size.bit_length() - 2 if spread else None


def _memory(*caches: Tensor) -> tuple[Tensor, ...]:
    """Quantised ones as bytes."""
    quantised = kv_format.is_quantised(caches[0].dtype)
    return tuple(cache.view(torch.uint8) for cache in caches) if quantised else caches


def forms(capability: int) -> list[Form]:
    pointers = {
        **dict.fromkeys(("p_qkv", "p_k", "p_v"), "*bf16:16"),
        **dict.fromkeys(("p_cos", "p_sin"), "*fp32:16"),
        "p_slots": "*i64:16",
    }
    integers = {"num_heads": "i32", "num_kv_heads": "i32", "block_size": "i32:16"}
    strides = [f"{name}_{stride}" for name in "kv" for stride in ("token_stride", "head_stride")]
    found = []
    for name, pointer, dtype, head_size, constants in (
        ("bfloat16", "*bf16:16", torch.bfloat16, 128, {}),
        ("bfloat16", "*bf16:16", torch.bfloat16, 64, {"num_kv_heads": 1}),
        ("int8", "*u8:16", torch.int8, 128, {}),
        ("float8", "*u8:16", torch.float8_e4m3fn, 128, {}),
    ):
        types = {**pointers, **integers, "p_k_cache": pointer, "p_v_cache": pointer}
        constants = {**constants, **_constants(head_size, dtype)}
        label = f"rope_and_store {name} {head_size}"
        spread = {"SPREAD_BITS": _spread_bits(head_size, dtype)}
        found.append(Form(label, _rope_and_store_kernel, types, constants | spread, _WARPS, stages=1))
        if head_size == 128:
            types |= dict.fromkeys(strides, "i32:16")
            constants = {**constants, "k_stride": 1, "v_stride": 1}
            label = f"kv_store {name} {head_size}"
            found.append(Form(label, _kv_store_kernel, types, constants, _WARPS, stages=1))
    return found
