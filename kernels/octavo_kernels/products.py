"""Products with weights that are packed or rounded, and whole layers in one call: the part of `ops` that has
to do with weights, which takes it from here. Letters are those of `ops`.
"""

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass

from torch import Tensor, device, dtype

from octavo_kernels import gpu, reference
from octavo_kernels.cpu import decoder_layers as cpu_decoder_layers
from octavo_kernels.cpu import linear as cpu_linear
from octavo_kernels.cpu import linear_int8 as cpu_linear_int8
from octavo_kernels.cpu.decoder_layers import FusedLayer, FusedLayers, Product
from octavo_kernels.cpu.library import native
from octavo_kernels.cpu.linear import PackedLinear


def pack_linear(weight: Tensor) -> PackedLinear | None:
    """`weight` [N, K] in the order that `linear` reads it in; None where no native kernel multiplies it.

    The packed copy is as large, up to 31 rows more.
    """
    lib = native(weight)
    if lib is not None and cpu_linear.takes(lib, weight):
        return cpu_linear.pack(lib, weight)
    return None


def packs_linear(dtype: dtype, device: device) -> bool:
    """Whether `pack_linear` packs weights like that, if they have an even number of columns."""
    return device.type == "cpu" and cpu_linear.serves(dtype)


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: `x` [T, K], `bias` [N] or None, of the weight's type. Returns [T, N].

    A row's result is the same bit by bit whatever the other rows are, and however many.
    """
    return cpu_linear.multiply(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A weight [N, K] of int8 with a float32 scale for each row; made by `quantise_int8`."""

    out_features: int
    in_features: int
    scales: Tensor  # [N]
    weight: Tensor | None  # [N, K] int8, for the reference;
    packed: tuple[Tensor, Tensor] | None  # or what it is packed into
    lib: CDLL | None  # for the kernel of this library


def quantise_int8(weight: Tensor) -> Int8Linear:
    """Rounds `weight` [N, K] to multiples of each row's largest magnitude / 127."""
    rounded, scales = reference.linear_int8.quantise(weight)
    rows, columns = weight.shape
    lib = native(weight)
    if lib is not None and cpu_linear_int8.takes(lib, rounded):
        packed = cpu_linear_int8.pack(lib, rounded, scales)
        return Int8Linear(rows, columns, scales, None, packed, lib)
    return Int8Linear(rows, columns, scales, rounded, None, None)


def linear_int8(x: Tensor, weight: Int8Linear, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, with x rounded to multiples of the largest magnitude / 127 of 128 columns of
    each row: a scale for a whole row is set by a few large columns, at the cost of all others.

    `x` [T, K]; `bias` [N] of x's type, or None. Returns [T, N]. Rows with a NaN or an infinity come out as
    NaN. Natively, a row's result is the same bit by bit whatever the other rows are.
    """
    if weight.lib is not None and weight.packed is not None:
        return cpu_linear_int8.linear(weight.lib, x, weight.packed, weight.out_features, bias)
    assert weight.weight is not None
    return reference.linear_int8.linear(x, weight.weight, weight.scales, bias)


def fused_product(weight: PackedLinear | Int8Linear, bias: Tensor | None) -> Product | None:
    """`linear` or `linear_int8` of a layer for `fuse_layers`; None where no native kernel multiplies it."""
    if isinstance(weight, PackedLinear):
        return Product(weight.lib, weight.packed, None, bias, weight.out_features, weight.in_features)
    if weight.lib is None or weight.packed is None:
        return None
    packed, scales = weight.packed
    return Product(weight.lib, packed, scales, bias, weight.out_features, weight.in_features)


def fuse_layers(layers: Sequence[FusedLayer | None]) -> FusedLayers | None:
    """What runs all of them in one call; None where the native kernels of this CPU cannot or are not to, or
    one is None.

    Each layer is what `rms_norm` (from the second on `add_rms_norm`), `linear`, `rope_and_store`,
    `paged_attention`, `linear`, `add_rms_norm`, `linear`, `silu_and_mul` and `linear` give in this order.
    """
    known = [layer for layer in layers if layer is not None and cpu_decoder_layers.takes(layer)]
    if known and gpu.serves(known[0].input_norm.weight):
        return None
    return FusedLayers(known) if known and len(known) == len(layers) else None
