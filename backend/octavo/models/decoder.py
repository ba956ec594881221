"""The parts that decoder-only models share: rotary embedding, gated MLP, a layer, and the stack of layers.

A model file (`llama.py`) chooses the parts and names their tensors. `forward` gives hidden states; logits are
a step of their own, for the rows that are sampled. A stack may hold a range of the model's layers, so that a
pipeline stage is the same code.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, device, tensor

from octavo.errors import ConfigError
from octavo.layers import rope
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.inputs import LayerCache, ModelInput
from octavo.layers.linear import Linear, Placement, column_linear, row_linear
from octavo.layers.norm import RMSNorm
from octavo.models.model_config import RopeConfig
from octavo_kernels import ops


def rotary_embedding(config: RopeConfig, head_size: int, where: device) -> rope.RotaryEmbedding:
    """The frequencies that `config` describes. Raises `ConfigError` for a kind that has no code."""
    base = rope.frequencies(head_size, config.theta)
    match config.kind:
        case "default":
            inv_freq = base
        case "linear":
            inv_freq = base / config.factor
        case "llama3":
            inv_freq = rope.llama3_frequencies(
                base,
                config.factor,
                config.low_freq_factor,
                config.high_freq_factor,
                config.original_max_positions,
            )
        case "yarn":
            inv_freq = rope.yarn_frequencies(
                base,
                config.theta,
                config.factor,
                config.original_max_positions,
                config.beta_fast,
                config.beta_slow,
                config.truncate,
            )
        case "factors":
            inv_freq = base / tensor(config.frequency_factors)
        case _:
            raise ConfigError(f"rope kind '{config.kind}' has no code in this version")
    return rope.RotaryEmbedding(inv_freq, config.attention_factor, where)


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, hidden_size: int, size: int, bias: bool, name: str, placement: Placement) -> None:
        gate_up = {f"{name}.gate_proj": size, f"{name}.up_proj": size}
        self._gate_up = column_linear(hidden_size, gate_up, bias, placement)
        self._down = row_linear(size, hidden_size, f"{name}.down_proj", bias, placement)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, H]. Returns [T, H]."""
        return self._down(ops.silu_and_mul(self._gate_up(x)))

    def fused(self) -> tuple[ops.Product | None, ops.Product | None]:
        """The two products for `ops.fuse_layers`."""
        return self._gate_up.fused(), self._down.fused()

    def finish_loading(self) -> None:
        self._gate_up.finish_loading()
        self._down.finish_loading()

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._gate_up.weight_map()
        yield from self._down.weight_map()


class DecoderLayer:
    """Attention and MLP, each behind a norm and beside a residual. `group` is the layer's KV group."""

    def __init__(
        self,
        input_norm: RMSNorm,
        qkv: Linear,
        attention: Attention,
        output: Linear,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        group: int = 0,
    ) -> None:
        self._input_norm = input_norm
        self._qkv = qkv
        self._attention = attention
        self._output = output
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._group = group

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        inputs: ModelInput,
    ) -> tuple[Tensor, Tensor]:
        """`hidden` and `residual` [T, H] are summands of the layer's input. Returns those of its output."""
        if residual is None:
            hidden, residual = self._input_norm(hidden), hidden
        else:
            hidden, residual = self._input_norm.add(hidden, residual)
        batch = inputs.attention[self._group]
        hidden = self._output(self._attention(self._qkv(hidden), cos, sin, cache, batch))
        hidden, residual = self._mlp_norm.add(hidden, residual)
        return self._mlp(hidden), residual

    def fused(self) -> ops.FusedLayer | None:
        """This layer for `ops.fuse_layers`; None where that cannot have it. Only after `finish_loading`."""
        qkv, output, (gate_up, down) = self._qkv.fused(), self._output.fused(), self._mlp.fused()
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        attention = self._attention.fused(self._group)
        input_norm, mlp_norm = self._input_norm.fused(), self._mlp_norm.fused()
        return ops.FusedLayer(input_norm, qkv, attention, output, mlp_norm, gate_up, down)

    def finish_loading(self) -> None:
        for part in (self._qkv, self._output, self._mlp):
            part.finish_loading()

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        for part in (self._input_norm, self._qkv, self._output, self._mlp_norm, self._mlp):
            yield from part.weight_map()


class Decoder:
    """A stack of layers. A model's first stage has its `embedding`, its last the `norm` and the `head`; where
    embedding and head are tied, the last stage has the embedding instead of a head.

    Fill what `weight_map` names, and call `finish_loading`, before the first `forward`.
    """

    def __init__(
        self,
        rotary: rope.RotaryEmbedding,
        layers: Sequence[DecoderLayer],
        embedding: Embedding | None,
        norm: RMSNorm | None,
        head: Linear | None,
    ) -> None:
        self._rotary = rotary
        self._layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._fused: ops.FusedLayers | None = None  # all layers in one call, where they can be

    def forward(
        self, inputs: ModelInput, caches: Sequence[LayerCache], hidden: Tensor | None = None
    ) -> Tensor:
        """Stores the batch's K and V in `caches`, one for each layer here; returns hidden states [T, H].

        `hidden` [T, H] is what the stage before returned, and may be overwritten; the first stage takes none.
        """
        if hidden is None:
            assert self._embedding is not None
            hidden = self._embedding(inputs.input_ids)
        cos, sin = self._rotary(inputs.positions)
        if self._fused is not None and self._fused.takes(hidden, caches):
            return self._finish(*self._fused.run(hidden, cos, sin, caches, inputs.attention))
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden, residual = layer(hidden, residual, cos, sin, cache, inputs)
        assert residual is not None
        return self._finish(hidden, residual)

    def _finish(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return hidden + residual if self._norm is None else self._norm.add(hidden, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, H], some rows of what the last stage returned. Returns [R, V]."""
        if self._head is not None:
            return self._head(hidden)
        assert self._embedding is not None
        return self._embedding.logits(hidden)

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` tokens with the largest logits, and those: both [R, count], in falling order, as
        `ops.linear_best` has them. Cheaper than all logits."""
        if self._head is not None:
            return self._head.best(hidden, count)
        assert self._embedding is not None
        return self._embedding.best(hidden, count)

    def finish_loading(self) -> None:
        """Lets weights take the form they are multiplied in; the views of `weight_map` are void then."""
        for layer in self._layers:
            layer.finish_loading()
        self._fused = ops.fuse_layers([layer.fused() for layer in self._layers])
        if self._head is not None:
            self._head.finish_loading()
        elif self._embedding is not None and self._norm is not None:  # tied, and the last stage
            self._embedding.become_head()

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor to load: its Hugging Face name, and the view of a (fused) parameter to fill."""
        if self._embedding is not None:
            yield from self._embedding.weight_map()
        for layer in self._layers:
            yield from layer.weight_map()
        if self._norm is not None:
            yield from self._norm.weight_map()
        if self._head is not None:
            yield from self._head.weight_map()
