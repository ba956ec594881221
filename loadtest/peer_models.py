"""The one model of all peers, exported for those that read Hugging Face folders, and its sizes."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.models.model_config import ModelConfig
from octavo.weights.loader import Checkpoint, open_checkpoint
from peer_table import SMOLLM2, Work

# In vLLM's format for int8 products: a scale for each output of a weight, and for each token as it comes.
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def export_models(folder: Path) -> None:
    """Writes `model` in bfloat16 and `model-int8` into `folder`, as far as they are not there yet."""
    checkpoint = open_checkpoint(SMOLLM2)
    config = {**checkpoint.config(), "dtype": "bfloat16"}
    if not (folder / "model/config.json").exists():
        _write(folder / "model", _tensors(checkpoint), config)
    if not (folder / "model-int8/config.json").exists():
        tensors = _quantised(_tensors(checkpoint))
        _write(folder / "model-int8", tensors, {**config, "quantization_config": _W8A8})


def vocab_size() -> int:
    return int(open_checkpoint(SMOLLM2).config()["vocab_size"])


def step_bytes(work: Work, quantization: str | None) -> int:
    """What a decode step of `work` cannot but read: every weight once, and the keys and values of its mean
    context. Octavo's output head is in int8 as the linear layers are."""
    checkpoint = open_checkpoint(SMOLLM2)
    config = ModelConfig.from_dict(checkpoint.config())
    weights = 0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        is_int8 = quantization == "int8" and len(shape) == 2
        weights += math.prod(shape) * (1 if is_int8 else 2)
    context = work.sequences * (work.prompt_tokens + work.output_tokens / 2)
    return weights + int(context * config.num_layers * 2 * config.num_kv_heads * config.head_size * 2)


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors = {name: torch.empty(checkpoint.shape(name), dtype=torch.bfloat16) for name in checkpoint.names()}
    for name, tensor in tensors.items():
        checkpoint.load_into(name, tensor)
    return tensors


def _quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every linear layer's weight rounded to the nearest of 255 steps of its row."""
    quantised = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            quantised[name] = (weight.float() / scale).round().to(torch.int8)
            quantised[f"{name}_scale"] = scale  # [out_features, 1]
    return quantised


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """The configuration comes last: where it is, the folder is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
