"""The configuration of a tiny model that nobody loads, for tests of its KV cache."""

from octavo.models.model_config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=64,
    vocab_size=100,
    max_positions=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
    bos_token_id=None,
    torch_dtype="float32",
)
