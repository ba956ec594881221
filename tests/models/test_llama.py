"""A tiny random Llama against Transformers: logits of ragged, mixed batches under every variant."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from driving import Driver
from numerics import assert_close
from octavo.errors import ConfigError
from octavo.layers.linear import Shard
from octavo.models.decoder import Decoder, rotary_embedding
from octavo.models.model_config import ModelConfig, RopeConfig
from octavo.models.registry import build_model
from octavo.quant.base import Scheme, Unquantised
from octavo.quant.int8 import Int8
from octavo.weights.loader import load_weights, open_checkpoint
from octavo_kernels.cpu import linear
from octavo_kernels.cpu.decoder_layers import FusedLayers
from octavo_kernels.cpu.library import library
from tiny import tiny_llama

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head size from hidden size": {"head_dim": None},
    "one KV head": {"num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 6},
    "as many KV heads": {"num_key_value_heads": 6},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
}


def make_model(folder: Path, **overrides: Any) -> Any:
    """Transformers' model, saved; norms and biases, which it sets to one and zero, are random too."""
    model = tiny_llama(folder, **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    scheme: Scheme | None = None,
) -> tuple[Decoder, ModelConfig]:
    checkpoint = open_checkpoint(str(folder))
    config = ModelConfig.from_dict(checkpoint.config())
    model = build_model(config, dtype, CPU, layers=layers, scheme=scheme)
    if layers is None:
        load_weights(model.weight_map(), checkpoint)
    else:
        for name, destination in model.weight_map():
            checkpoint.load_into(name, destination)
    model.finish_loading()
    return model, config


def drive_everything(driver: Driver) -> list[tuple[int, list[int], Tensor]]:
    """Chunks, decoding, forks, copies, a prefix hit and blocks used again, in mixed batches.

    Returns, for every token sampled, its sequence, the tokens before it, and the logits [V] for it.
    """
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 320, (count,), generator=generator).tolist()

    sampled: list[tuple[int, list[int], Tensor]] = []

    def step() -> None:
        before = {seq_id: list(seq.token_ids) for seq_id, seq in driver.sequences.items()}
        sampled.extend((seq_id, before[seq_id], logits) for seq_id, logits in driver.step().items())

    long, short, forked = tokens(150), tokens(5), tokens(17)
    driver.new(1, long)
    driver.compute(1, 7)
    driver.new(2, short)
    driver.compute(2)
    step()
    driver.compute(1, 9)  # a chunk in the middle of a prompt
    driver.compute(2)  # a decode
    driver.new(3, forked)
    driver.compute(3, children=(4, 5))  # three sequences sample from one prompt
    step()
    driver.compute(1)  # the rest of the prompt
    for seq_id in (2, 3, 4, 5):  # 3 and 4 copy the block that 5 writes to
        driver.compute(seq_id)
    step()
    driver.finish(2)
    driver.new(6, long[:140], prefix_of=1, hit=128)
    driver.compute(6)
    driver.new(7, tokens(33))
    driver.compute(7, 32)  # into the blocks that 2 left
    for seq_id in (1, 5, 3):
        driver.compute(seq_id)
    step()
    for _ in range(3):
        for seq_id in (7, 1, 6, 5, 3):
            driver.compute(seq_id)
        step()
    assert len(sampled) == 29
    return sampled


def check(sampled: list[tuple[int, list[int], Tensor]], reference: Any, tolerance: float) -> None:
    """A sequence's later tokens follow its earlier ones, so one forward of the reference is enough for it."""
    longest = {seq_id: token_ids for seq_id, token_ids, _ in sampled}
    with torch.no_grad():
        wanted = {seq_id: reference(torch.tensor([ids])).logits[0] for seq_id, ids in longest.items()}
    for seq_id, token_ids, logits in sampled:
        name = f"logits of sequence {seq_id} after {len(token_ids)} tokens"
        assert token_ids == longest[seq_id][: len(token_ids)]
        assert_close(name, logits, wanted[seq_id][len(token_ids) - 1], tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    reference = make_model(tmp_path, **VARIANTS[variant])
    model, config = load(tmp_path)
    for block_size in (1, 8, 16, 128):
        check(drive_everything(Driver(model, config, block_size)), reference, 1e-4)


def test_bfloat16_is_close(tmp_path: Path) -> None:
    reference = make_model(tmp_path)
    model, config = load(tmp_path, torch.bfloat16)
    for block_size in (8, 128):
        sampled = drive_everything(Driver(model, config, block_size, torch.bfloat16))
        assert all(logits.dtype == torch.bfloat16 for _, _, logits in sampled)
        check(sampled, reference, 0.05)


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.int8, 0.04), (torch.float8_e4m3fn, 0.12)])
def test_quantised_caches_are_close_and_depend_on_no_other_sequence(
    tmp_path: Path, kind: torch.dtype, tolerance: float
) -> None:
    reference = make_model(tmp_path)
    model, config = load(tmp_path)
    runs = [drive_everything(Driver(model, config, block_size, kind)) for block_size in (1, 8, 128)]
    check(runs[0], reference, tolerance)
    for sampled in runs[1:]:
        for (*who, logits), (*other, wanted) in zip(sampled, runs[0], strict=True):
            assert who == other
            assert_close(f"logits of sequence {who[0]}", logits, wanted, 1e-3)
    for seq_id, token_ids, logits in runs[1]:
        alone = Driver(model, config, 8, kind)
        alone.new(seq_id, token_ids)
        alone.compute(seq_id)
        assert_close(f"logits of sequence {seq_id} alone", alone.step()[seq_id], logits, 1e-3)


@pytest.mark.parametrize("kind", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scheme", [Unquantised(), Int8()], ids=["unquantised", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["tied", "biases", "one KV head", "rope llama3"])
def test_layers_in_one_call_give_the_bits_of_kernels_one_by_one(
    tmp_path: Path,
    variant: str,
    dtype: torch.dtype,
    scheme: Scheme,
    kind: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kind`: of the KV cache; the activations' when None."""
    make_model(tmp_path, **{**VARIANTS[variant], "head_dim": 32})
    model, config = load(tmp_path, dtype, scheme=scheme)
    calls: list[int] = []
    run = FusedLayers.run
    monkeypatch.setattr(FusedLayers, "run", lambda *args: calls.append(1) or run(*args))
    together = drive_everything(Driver(model, config, 8, kind or dtype))
    has_product = (
        hasattr(library(), "octavo_linear_int8") if isinstance(scheme, Int8) else linear.serves(dtype)
    )
    assert bool(calls) == has_product  # no one call without products of our own
    monkeypatch.setattr(model, "_fused", None)
    one_by_one = drive_everything(Driver(model, config, 8, kind or dtype))
    for (*who, logits), (*other, wanted) in zip(together, one_by_one, strict=True):
        assert who == other
        assert torch.equal(logits, wanted)


def test_stages_of_a_pipeline_are_the_whole_model(tmp_path: Path) -> None:
    make_model(tmp_path)
    whole, config = load(tmp_path)
    first, _ = load(tmp_path, layers=range(1))
    last, _ = load(tmp_path, layers=range(1, 3))
    stages = [build_model(config, torch.float32, CPU, layers=layers) for layers in (range(1), range(1, 3))]
    names = [{name for name, _ in stage.weight_map()} for stage in stages]
    assert names[0] | names[1] == open_checkpoint(str(tmp_path)).names()
    assert names[0] & names[1] == {"model.embed_tokens.weight"}  # tied: the last stage's head

    class Pipeline(Decoder):
        def __init__(self) -> None:
            pass

        def forward(self, inputs: Any, caches: Any, hidden: Tensor | None = None) -> Tensor:
            assert hidden is None
            return last.forward(inputs, caches[1:], first.forward(inputs, caches[:1]))

        def logits(self, hidden: Tensor) -> Tensor:
            return last.logits(hidden)

    drivers = Driver(whole, config, 8), Driver(Pipeline(), config, 8)
    for driver in drivers:
        driver.new(1, range(20, 40))
        driver.compute(1)
    expected, actual = (driver.step()[1] for driver in drivers)
    assert_close("logits", actual, expected, 1e-6)


def test_the_weight_map_names_every_tensor_of_the_checkpoint(tmp_path: Path) -> None:
    make_model(tmp_path, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(ModelConfig.from_dict(checkpoint.config()), torch.float32, CPU)
    weight_map = dict(model.weight_map())
    assert weight_map.keys() == checkpoint.names()
    for name, view in weight_map.items():
        assert tuple(view.shape) == checkpoint.shape(name), name


def test_an_unknown_architecture_and_an_unknown_rope_kind_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = ModelConfig.from_dict(open_checkpoint(str(tmp_path)).config())
    with pytest.raises(ConfigError, match="architecture 'Other' is not supported; known: LlamaForCausalLM"):
        build_model(dataclasses.replace(config, architecture="Other"), torch.float32, CPU)
    with pytest.raises(ConfigError, match="rope kind 'spiral'"):
        rotary_embedding(RopeConfig(kind="spiral"), 8, CPU)  # type: ignore[arg-type]


def test_heads_that_a_shard_cannot_divide_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = ModelConfig.from_dict(open_checkpoint(str(tmp_path)).config())
    with pytest.raises(ConfigError, match=r"'tensor_parallel_size' is 4; it must divide num_attention_heads"):
        build_model(config, torch.float32, CPU, shard=Shard(0, 4))
