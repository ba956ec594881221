"""Native `ops.FusedLayers`: all layers of a decoder in one call of C, outside the interpreter's lock.

What comes out is, bit by bit, what the layers give when they call one kernel after the other.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.cpu import paged_attention
from octavo_kernels.cpu.library import TYPES, cache_type, num_threads


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer, packed by `linear` or, with the scales of its outputs, by `linear_int8`."""

    lib: ctypes.CDLL
    packed: Tensor
    scales: Tensor | None
    bias: Tensor | None
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # [H]
    eps: float


@dataclass(frozen=True, slots=True)
class Attention:
    """As `ops.paged_attention` takes these numbers. Layers of one `group` share block tables."""

    num_heads: int
    head_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    group: int


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Attention and a gated MLP, each behind a norm and beside a residual."""

    input_norm: Norm
    qkv: Product
    attention: Attention
    output: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product

    @property
    def num_kv_heads(self) -> int:
        return (self.qkv.out_features // self.attention.head_size - self.attention.num_heads) // 2


class Cache(Protocol):
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...


class Batch(Protocol):
    """A step's integers for one group, as `ops.paged_attention` and `ops.kv_store` take them."""

    @property
    def slot_mapping(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def context_lens(self) -> Tensor: ...
    @property
    def query_start(self) -> Tensor: ...


class FusedLayers:
    """`layers` of one library, each of which `takes` says can be fused. Any one thread at a time."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers  # whose tensors the structures point into
        self._structures = (_Layer * len(layers))(*map(_layer, layers))
        self._caches: Sequence[Cache] | None = None  # that the structures point to: the same in every step
        self._wide = max(max(layer.qkv.out_features, layer.gate_up.out_features) for layer in layers)
        self._narrow = max(max(layer.output.in_features, layer.down.in_features) for layer in layers)

    def takes(self, hidden: Tensor, caches: Sequence[Cache]) -> bool:
        weight, k, v = self._layers[0].input_norm.weight, caches[0].k, caches[0].v
        return (
            weight.dtype == hidden.dtype
            and k.dtype == v.dtype
            and cache_type(k, hidden.dtype) is not None
            and all(x.is_contiguous() for x in (hidden, weight, k, v))
        )

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[Cache], batches: Sequence[Batch]
    ) -> tuple[Tensor, Tensor]:
        """`hidden` [T, H], which is overwritten; `cos`, `sin` as for `ops.rope`; a cache for each layer, in a
        sequence that never changes; a batch for each group. Stores K and V; returns the two summands of the
        last layer's output, [T, H]."""
        residual, (num_tokens, size) = hidden, hidden.shape
        hidden, norm = torch.empty_like(residual), torch.empty_like(residual)
        wide = residual.new_empty((num_tokens, self._wide))
        narrow = residual.new_empty((num_tokens, self._narrow))
        if caches is not self._caches:
            self._bind(caches, residual.dtype)
        state = _State(
            *(x.data_ptr() for x in (hidden, residual, norm, wide, narrow, cos, sin)),
            *(num_tokens, size, TYPES[residual.dtype], num_threads()),
        )
        failed = self._layers[0].qkv.lib.octavo_decoder_layers(
            ctypes.byref(state),
            self._structures,
            len(self._structures),
            (_Batch * len(batches))(*map(_batch, batches)),
        )
        if failed:
            raise MemoryError(f"no memory for what {num_tokens} tokens need beside their activations")
        return hidden, residual

    def _bind(self, caches: Sequence[Cache], dtype: torch.dtype) -> None:
        for structure, cache in zip(self._structures, caches, strict=True):
            structure.k_cache, structure.v_cache = cache.k.data_ptr(), cache.v.data_ptr()
            structure.block_size = kv_format.block_size(cache.k, structure.head_size)
            structure.cache_type = cache_type(cache.k, dtype)
        self._caches = caches


def takes(layer: FusedLayer) -> bool:
    attention = layer.attention
    return (
        hasattr(layer.qkv.lib, "octavo_decoder_layers")
        and all(norm.weight.is_contiguous() for norm in (layer.input_norm, layer.mlp_norm))
        and paged_attention.takes_heads(attention.num_heads, layer.num_kv_heads, attention.head_size)
    )


def _structure(**fields: Any) -> Any:
    return type("_Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


# Those of decoder_layers.c.
_Product = _structure(packed=c_void_p, bias=c_void_p, scales=c_void_p, outputs=c_int64, inputs=c_int64)
_Layer = _structure(
    **dict.fromkeys(("qkv", "output", "gate_up", "down"), _Product),
    **dict.fromkeys(("input_norm", "mlp_norm", "k_cache", "v_cache"), c_void_p),
    **dict.fromkeys(("heads", "kv_heads", "head_size", "block_size"), c_int64),
    **dict.fromkeys(("cache_type", "window", "group"), c_int64),
    **dict.fromkeys(("scale", "soft_cap", "input_eps", "mlp_eps"), c_float),
)
_Batch = _structure(
    **dict.fromkeys(("slots", "tables", "contexts", "starts"), c_void_p),
    **dict.fromkeys(("table_width", "sequences"), c_int64),
)
_State = _structure(
    **dict.fromkeys(("hidden", "residual", "norm", "wide", "narrow", "cos", "sin"), c_void_p),
    **dict.fromkeys(("tokens", "hidden_size", "type", "threads"), c_int64),
)


def _layer(layer: FusedLayer) -> Any:
    """But for its cache."""
    attention = layer.attention
    return _Layer(
        qkv=_product(layer.qkv),
        output=_product(layer.output),
        gate_up=_product(layer.gate_up),
        down=_product(layer.down),
        input_norm=layer.input_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        heads=attention.num_heads,
        kv_heads=layer.num_kv_heads,
        head_size=attention.head_size,
        window=attention.window or 0,
        group=attention.group,
        scale=attention.scale,
        soft_cap=attention.soft_cap or 0.0,
        input_eps=layer.input_norm.eps,
        mlp_eps=layer.mlp_norm.eps,
    )


def _product(product: Product) -> Any:
    return _Product(
        packed=product.packed.data_ptr(),
        bias=None if product.bias is None else product.bias.data_ptr(),
        scales=None if product.scales is None else product.scales.data_ptr(),
        outputs=product.out_features,
        inputs=product.in_features,
    )


def _batch(batch: Batch) -> Any:
    assert batch.block_tables.dtype == batch.context_lens.dtype == batch.query_start.dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64
    sequences, table_width = batch.block_tables.shape
    return _Batch(
        slots=batch.slot_mapping.data_ptr(),
        tables=batch.block_tables.data_ptr(),
        contexts=batch.context_lens.data_ptr(),
        starts=batch.query_start.data_ptr(),
        table_width=table_width,
        sequences=sequences,
    )
