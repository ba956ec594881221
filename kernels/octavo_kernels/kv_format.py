"""How keys and values lie in a layer's cache: as numbers of the activations' type, or quantised.

A quantised cache is [N, Hkv, B * (D + 2)] of int8 or float8_e4m3fn. What a block holds of one KV head, a
tile, is B x D numbers of one byte, then B scales of bfloat16. A token's key is its D numbers times its scale,
which is found from those D alone: what is stored of a token depends on no other token. Whoever copies a block
copies its scales with it.

Keys are spread before, and so are the queries that meet them, which leaves their products as they were: see
`spread`.

Used by `ops` and the kernels behind it, and by whoever allocates a cache.
"""

import torch
from torch import Tensor, dtype

SCALE_BYTES = 2
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_SPREAD = 16
_LEAST_SCALE = 1e-30  # tokens whose numbers are all below a hundred of it become zeros


def is_quantised(dtype: dtype) -> bool:
    return dtype in _LARGEST


def block_shape(num_kv_heads: int, block_size: int, head_size: int, dtype: dtype) -> tuple[int, ...]:
    """What one block is of a cache of keys, or of values: the shape behind N."""
    if is_quantised(dtype):
        return num_kv_heads, block_size * (head_size + SCALE_BYTES)
    return num_kv_heads, block_size, head_size


def block_size(cache: Tensor, head_size: int) -> int:
    """The B of a layer's cache of keys or values."""
    return cache.shape[2] // (head_size + SCALE_BYTES) if is_quantised(cache.dtype) else cache.shape[2]


def quantise(x: Tensor, to: dtype) -> tuple[Tensor, Tensor]:
    """`x` [R, D] as numbers of type `to` [R, D] and bfloat16 scales [R, 1]; the largest of a row becomes the
    largest that the type has, as far as the scale's rounding lets it.

    The scale of a row with a NaN or an infinity is one, and its numbers come back as NaN.
    """
    wide = x.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / _LARGEST[to]).clamp_min(_LEAST_SCALE).bfloat16()
    ratios = (wide / scales.float()).nan_to_num(0.0)
    return (ratios.round() if to == torch.int8 else ratios).to(to), scales


def spreads(head_size: int) -> bool:
    """Powers of two, from what fills a register natively."""
    return head_size >= _LEAST_SPREAD and head_size & (head_size - 1) == 0


def spread(x: Tensor) -> Tensor:
    """`x` [..., D] in float32, each head times a Hadamard matrix over the root of D, which is orthogonal and
    its own inverse (QuaRot, arXiv 2404.00456); as it is where D is not `spreads`.

    A few numbers of keys are large, at the same places in all of them and in the queries, so that what is
    rounded off there decides the error of a score. Afterwards every number has a share in them.
    """
    mixed = x.float()
    if not spreads(x.shape[-1]):
        return mixed
    mixed = mixed * x.shape[-1] ** -0.5
    stride = 1
    while stride < x.shape[-1]:
        first, second = mixed.reshape(-1, 2, stride).unbind(1)
        mixed = torch.stack((first + second, first - second), dim=1)
        stride *= 2
    return mixed.view(x.shape)


def store(x: Tensor, cache: Tensor, slot_rows: Tensor) -> None:
    """Quantises `x` [R, D] into a layer's cache. `slot_rows` [R]: tile x B + slot, a tile being block x Hkv +
    head."""
    numbers, scales = quantise(x, cache.dtype)
    to_numbers, to_scales = _parts(cache.view(torch.uint8).flatten(0, 1), x.shape[-1])
    tiles, slots = slot_rows // to_numbers.shape[1], slot_rows % to_numbers.shape[1]
    to_numbers[tiles, slots] = numbers.view(torch.uint8)
    to_scales[tiles, slots] = scales.view(torch.uint8)


def dequantise(tiles: Tensor, head_size: int, to: dtype) -> Tensor:
    """Tiles [R, B * (D + 2)] of a cache as numbers [R, B * D] of type `to`."""
    numbers, scales = _parts(tiles.view(torch.uint8), head_size)
    wide = numbers.view(tiles.dtype).float() * scales.contiguous().view(torch.bfloat16).float()
    return wide.to(to).flatten(1)


def _parts(tiles: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of the bytes of tiles [R, B * (D + 2)]: the numbers [R, B, D], and the scales [R, B, 2]."""
    count, size = len(tiles), tiles.shape[1] // (head_size + SCALE_BYTES)
    numbers = tiles[:, : size * head_size].view(count, size, head_size)
    return numbers, tiles[:, size * head_size :].view(count, size, SCALE_BYTES)
