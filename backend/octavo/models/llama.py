"""The Llama family: grouped-query attention, rotary embeddings, a gated MLP, norms before each."""

from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Placement, column_linear, row_linear
from octavo.layers.norm import RMSNorm
from octavo.models.decoder import Decoder, DecoderLayer, GatedMLP, rotary_embedding
from octavo.models.model_config import ModelConfig


class LlamaForCausalLM(Decoder):
    """Layers `layers` of the model, all by default. The weights are unfilled: see `weight_map`."""

    def __init__(self, config: ModelConfig, placement: Placement, layers: range | None = None) -> None:
        """Raises `ConfigError` when a size cannot be divided by the shard."""
        layers = layers or range(config.num_layers)
        first, last = layers.start == 0, layers.stop == config.num_layers
        embedding, head = None, None
        if first or (last and config.tie_embeddings):
            embedding = Embedding(config.vocab_size, config.hidden_size, "model.embed_tokens", placement)
        if last and not config.tie_embeddings:
            head = column_linear(config.hidden_size, {"lm_head": config.vocab_size}, False, placement)
        super().__init__(
            rotary_embedding(config.rope, config.head_size, placement.device),
            [_layer(config, f"model.layers.{index}", placement) for index in layers],
            embedding,
            RMSNorm(config.hidden_size, config.rms_norm_eps, "model.norm", placement) if last else None,
            head,
        )


def _layer(config: ModelConfig, name: str, placement: Placement) -> DecoderLayer:
    hidden_size, head_size = config.hidden_size, config.head_size
    attention = f"{name}.self_attn"
    qkv = {
        f"{attention}.q_proj": config.num_heads * head_size,
        f"{attention}.k_proj": config.num_kv_heads * head_size,
        f"{attention}.v_proj": config.num_kv_heads * head_size,
    }
    shard = placement.shard
    return DecoderLayer(
        input_norm=RMSNorm(hidden_size, config.rms_norm_eps, f"{name}.input_layernorm", placement),
        qkv=column_linear(hidden_size, qkv, config.attention_bias, placement),
        attention=Attention(
            shard.part_of(config.num_heads, "num_attention_heads"),
            shard.part_of(config.num_kv_heads, "num_key_value_heads"),
            head_size,
            scale=head_size**-0.5,
        ),
        output=row_linear(
            config.num_heads * head_size, hidden_size, f"{attention}.o_proj", config.attention_bias, placement
        ),
        mlp_norm=RMSNorm(hidden_size, config.rms_norm_eps, f"{name}.post_attention_layernorm", placement),
        mlp=GatedMLP(hidden_size, config.intermediate_size, config.mlp_bias, f"{name}.mlp", placement),
    )
