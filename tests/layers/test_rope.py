"""Rotary frequencies against Transformers' for every kind of scaling."""

from typing import Any

import pytest
import torch

from numerics import assert_close
from octavo.layers import rope
from octavo.models.decoder import rotary_embedding
from octavo.models.model_config import RopeConfig

HEAD_SIZE = 24
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"factor": 6.0, "original_max_position_embeddings": 128}
CASES: list[tuple[RopeConfig, dict[str, Any]]] = [
    (RopeConfig(theta=5000.0), {"rope_type": "default"}),
    (RopeConfig(5000.0, "linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    (
        RopeConfig(5000.0, "llama3", 8.0, 1.0, 4.0, original_max_positions=128),
        {"rope_type": "llama3", **LLAMA3},
    ),
    (
        RopeConfig(5000.0, "yarn", 6.0, original_max_positions=128, attention_factor=1.5),
        {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
    ),
    (
        RopeConfig(5000.0, "yarn", 6.0, original_max_positions=128, truncate=False, beta_fast=8.0),
        {"rope_type": "yarn", **YARN, "truncate": False, "beta_fast": 8.0, "attention_factor": 1.0},
    ),
    (
        RopeConfig(5000.0, "yarn", 6.0, original_max_positions=5, beta_fast=2.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 5,
            "beta_fast": 2.0,
            "beta_slow": 2.0,
            "attention_factor": 1.0,
        },
    ),
]


@pytest.mark.parametrize(
    ("config", "parameters"), CASES, ids=[f"{c.kind}-{i}" for i, (c, _) in enumerate(CASES)]
)
def test_angles_equal_transformers(config: RopeConfig, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=HEAD_SIZE,
            max_position_embeddings=1024,
            rope_parameters={"rope_theta": 5000.0, **parameters},
        )
    )
    positions = torch.tensor([0, 1, 17, 1023])
    cos, sin = theirs(torch.zeros(1), positions[None])
    our_cos, our_sin = rotary_embedding(config, HEAD_SIZE, torch.device("cpu"))(positions)
    # At position 1000 the last bit of a frequency is worth 6e-5.
    assert_close("cos", our_cos, cos[0], 1e-5)
    assert_close("sin", our_sin[:, HEAD_SIZE // 2 :], sin[0, :, HEAD_SIZE // 2 :], 1e-5)
    assert_close("sin, first half", our_sin[:, : HEAD_SIZE // 2], -sin[0, :, : HEAD_SIZE // 2], 1e-5)


def test_factors_divide_the_frequencies() -> None:
    """A GGUF file stores what Llama 3's scaling divides by."""
    base = rope.frequencies(HEAD_SIZE, 5000.0)
    scaled = rope.llama3_frequencies(base, 8.0, 1.0, 4.0, 128)
    config = RopeConfig(5000.0, "factors", frequency_factors=tuple((base / scaled).tolist()))
    device, positions = torch.device("cpu"), torch.arange(100)
    expected = rope.RotaryEmbedding(scaled, 1.0, device)(positions)
    for name, ours, wanted in zip(
        ("cos", "sin"), rotary_embedding(config, HEAD_SIZE, device)(positions), expected, strict=True
    ):
        assert_close(name, ours, wanted, 1e-5)
