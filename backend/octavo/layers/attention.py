"""Attention over the paged cache: rotates, stores, attends. The projections around it are linear layers."""

from torch import Tensor

from octavo.layers.inputs import AttentionInput, LayerCache
from octavo_kernels import ops


class Attention:
    """One layer's attention. Head counts are this shard's; the arguments may differ from layer to layer."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self._num_heads = num_heads
        self._head_size = head_size
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, batch: AttentionInput
    ) -> Tensor:
        """`qkv` [T, (Hq + 2 Hkv) D]; `cos`, `sin` [T, D]. Stores K and V; returns [T, Hq D].

        What `qkv` holds afterwards is undefined.
        """
        heads = qkv.view(len(qkv), -1, self._head_size)
        q = ops.rope_and_store(
            heads, self._num_heads, cos, sin, cache.k, cache.v, batch.slot_mapping, batch.plan
        )
        attended = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_tables,
            batch.context_lens,
            batch.query_start,
            self._scale,
            self._window,
            self._soft_cap,
            batch.plan,
        )
        return attended.flatten(1)

    def fused(self, group: int) -> ops.Attention:
        """This layer for `ops.fuse_layers`."""
        return ops.Attention(
            self._num_heads, self._head_size, self._scale, self._window, self._soft_cap, group
        )
