"""`config.json` to `ModelConfig`: both spellings of Transformers, and a clear refusal of everything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.models.model_config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
    "pretraining_tp": 1,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_all_fields() -> None:
    config = ModelConfig.from_dict(LLAMA | {"rope_scaling": LLAMA3_ROPE})
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_size=64,
        intermediate_size=8192,
        vocab_size=128256,
        max_positions=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        torch_dtype="bfloat16",
    )


def test_defaults_are_those_of_transformers() -> None:
    """An old, short config: no head_dim, no key-value heads, no biases, no rope."""
    needed = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = ModelConfig.from_dict({key: LLAMA[key] for key in needed} | {"vocab_size": 32000})
    assert (config.num_kv_heads, config.head_size, config.max_positions) == (32, 64, 2048)
    assert (config.rms_norm_eps, config.rope) == (1e-6, RopeConfig(10000.0))
    assert (config.tie_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.torch_dtype) == ((), None, "float32")


@pytest.mark.parametrize("eos", [2, [2], [2, 2]])
def test_eos_may_be_one_or_several(eos: Any) -> None:
    assert ModelConfig.from_dict(LLAMA | {"eos_token_id": eos}).eos_token_ids == (2,)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (None, RopeConfig(500000.0)),
        ({"rope_type": "default"}, RopeConfig(500000.0)),
        ({"type": "linear", "factor": 2}, RopeConfig(500000.0, "linear", 2.0)),
        (LLAMA3_ROPE, RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)),
        (
            YARN,
            RopeConfig(
                500000.0, "yarn", 4.0, original_max_positions=4096, attention_factor=1.138629436111989
            ),
        ),
        (
            YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
            RopeConfig(
                500000.0,
                "yarn",
                4.0,
                original_max_positions=4096,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.5,
            ),
        ),
        (
            {"rope_type": "factors", "frequency_factors": [1.5] * 32},
            RopeConfig(500000.0, "factors", frequency_factors=(1.5,) * 32),
        ),
    ],
)
def test_rope_in_both_spellings(scaling: dict[str, Any] | None, rope: RopeConfig) -> None:
    assert ModelConfig.from_dict(LLAMA | {"rope_scaling": scaling}).rope == rope
    together = (scaling or {}) | {"rope_theta": 500000.0}
    without_theta = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert ModelConfig.from_dict(without_theta | {"rope_parameters": together}).rope == rope


@pytest.mark.parametrize("extra", [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 0.7}])
def test_the_attention_factor_of_yarn_is_that_of_transformers(extra: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        rope_parameters=YARN | {"rope_theta": 10000.0} | extra, max_position_embeddings=16384
    )
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    rope = ModelConfig.from_dict(LLAMA | {"rope_parameters": YARN | {"rope_theta": 10000.0} | extra}).rope
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)


def test_what_transformers_saves_is_understood(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    saved = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_key_value_heads=4,
        head_dim=32,
        rope_parameters=LLAMA3_ROPE | {"rope_theta": 12345.0},
        dtype="float16",
        attention_bias=True,
    )
    saved.save_pretrained(tmp_path)
    config = ModelConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert (config.hidden_size, config.num_kv_heads, config.head_size) == (4096, 4, 32)
    assert config.rope == RopeConfig(12345.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert config.attention_bias
    assert config.torch_dtype == "float16"


def refused(change: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(LLAMA | change)
    assert len(str(caught.value)) < 300
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("architectures", ["GPT2LMHeadModel"], "supported: LlamaForCausalLM"),
        ("architectures", None, "supported: LlamaForCausalLM"),
        ("architectures", ["LlamaForCausalLM"] * 2, "supported: LlamaForCausalLM"),
        ("hidden_size", None, "an integer from 1 to 1048576"),
        ("hidden_size", "2048", "an integer from 1 to 1048576"),
        ("hidden_size", 2048.0, "an integer from 1 to 1048576"),
        ("hidden_size", True, "an integer from 1 to 1048576"),
        ("hidden_size", 10**9, "an integer from 1 to 1048576"),
        ("num_hidden_layers", 0, "an integer from 1 to 1024"),
        ("num_hidden_layers", 10**6, "an integer from 1 to 1024"),
        ("vocab_size", -1, "an integer from 1 to 4194304"),
        ("max_position_embeddings", 10**12, "an integer from 1 to 16777216"),
        ("num_key_value_heads", 5, "it must divide num_attention_heads, 32"),
        ("rms_norm_eps", 0, "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("rms_norm_eps", "1e-5", "a number above 0"),
        ("rope_theta", float("inf"), "a number of 2 and more"),
        ("rope_theta", 1.0, "a number of 2 and more"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("attention_bias", 1, "true or false"),
        ("bos_token_id", -1, "a token id or null"),
        ("eos_token_id", "2", "a token id, a list of them or null"),
        ("eos_token_id", [2, None], "a token id, a list of them or null"),
        ("torch_dtype", "float64", "supported: float32, bfloat16, float16"),
        ("hidden_act", "gelu", "supported: 'silu'"),
        ("sliding_window", 4096, "supported: None"),
        ("quantization_config", {"quant_method": "awq"}, "supported: None"),
        ("partial_rotary_factor", 0.5, "supported: 1.0"),
        ("rope_scaling", "linear", "an object or null"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(key: str, value: Any, allowed: str) -> None:
    complaint = refused({key: value})
    assert f"config key '{key}' is {value!r}" in complaint
    assert allowed in complaint


@pytest.mark.parametrize(
    ("key", "value", "allowed", "rest"),
    [
        ("rope_type", "dynamic", "supported: default, linear, llama3, yarn, factors", {}),
        ("rope_type", ["x"], "supported: default", {}),
        ("factor", None, "a number of 1 and more", {"rope_type": "linear"}),
        ("factor", 0.5, "a number of 1 and more", {"rope_type": "linear"}),
        ("low_freq_factor", 4, "below high_freq_factor, 4", LLAMA3_ROPE),
        ("original_max_position_embeddings", None, "an integer from 1", LLAMA3_ROPE),
        ("beta_slow", 64, "at most beta_fast, 32", YARN),
        ("partial_rotary_factor", 0.5, "supported: 1.0", {}),
        ("frequency_factors", [1.0], "32 numbers above 0", {"rope_type": "factors"}),
        ("frequency_factors", [0.0] * 32, "32 numbers above 0", {"rope_type": "factors"}),
    ],
)
def test_rope_settings_that_are_wrong_are_named(
    key: str, value: Any, allowed: str, rest: dict[str, Any]
) -> None:
    for spelling in ("rope_scaling", "rope_parameters"):
        complaint = refused({spelling: rest | {key: value}})
        assert f"config key '{spelling}.{key}' is {repr(value)[:40]}" in complaint
        assert allowed in complaint


def test_head_sizes_that_do_not_work() -> None:
    assert "without 'head_dim' it must be a multiple" in refused({"head_dim": None, "hidden_size": 2050})
    assert "the head size is 63; rotary embeddings need an even one" in refused({"head_dim": 63})
