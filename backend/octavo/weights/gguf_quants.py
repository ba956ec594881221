"""GGUF block formats to float32, vectorised over blocks. NumPy only; called by `weights.gguf`.

A quantised row is a run of blocks, each with its own scale. The formats are ggml's (ggml-quants.c); every
decoder gives bit for bit what the `gguf` package's slower `quants.dequantize` gives. Decoders write into
a buffer that the caller owns and reuses, so that a tensor of any size is decoded in a few megabytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(blocks: Bytes, kind: GGMLQuantizationType, out: Floats) -> None:
    """Decodes `blocks` [..., bytes] into `out` [..., weights]: C-contiguous, whole blocks in every row."""
    weights_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    flat = out.reshape(-1, weights_per_block)
    assert np.shares_memory(flat, out)
    DECODERS[kind](blocks.reshape(-1, bytes_per_block), flat)


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of each block: [n, 1]."""
    return blocks[:, offset : offset + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: npt.NDArray[Any]) -> None:
    """[..., k] bytes to [..., 2 k] values: all low halves, then all high halves."""
    half = packed.shape[-1]
    np.bitwise_and(packed, 15, out=out[..., :half], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., half:], casting="unsafe")


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes, out: Floats) -> None:
    """Fifth bits [n, 4] and nibbles [n, 16] to values 0 to 31 [n, 32]."""
    values = np.unpackbits(high, axis=1, bitorder="little")
    values <<= 4
    values[:, :16] |= low & np.uint8(15)
    values[:, 16:] |= low >> np.uint8(4)
    out[:] = values


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of the 8 groups of 32 in a Q4_K or Q5_K block: [n, 8, 1] each, ready to be applied.

    Twelve bytes hold sixteen numbers of six bits: bytes 0-3 and 4-7 the scales and minima of groups 0-3
    in their low six bits, bytes 8-11 the low four bits of groups 4-7 (scale low, minimum high), whose top
    two bits are those that bytes 0-7 have to spare.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups *= scales
    groups -= minima


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales_and_minima(blocks)
    values = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), values)
    # Bit j of the 32 bytes is the fifth bit of group j.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    groups = out.reshape(-1, 8, 32)
    groups[:] = values.reshape(-1, 8, 32) | ((fifth & 1) << 4)
    groups *= scales
    groups -= minima


def _q6_k(blocks: Bytes, out: Floats) -> None:
    values = np.empty((len(blocks), 2, 128), np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), values)
    # Two bits j of each half's 32 bytes are the top of its group j of 32.
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    top = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    out[:] = (values.reshape(-1, 2, 4, 32) | (top << 4)).reshape(out.shape)
    out -= 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


DECODERS: dict[GGMLQuantizationType, Callable[[Bytes, Floats], None]] = {
    GGMLQuantizationType.F32: _f32,
    GGMLQuantizationType.F16: _f16,
    GGMLQuantizationType.BF16: _bf16,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
