"""A GGUF file seen as a Hugging Face checkpoint: its names, its layout and a `config.json` for it.

`weights.loader.open_checkpoint` makes one. Two things differ from the Hugging Face folder that a file was
converted from, and are undone here. Names: `blk.0.attn_q` for `model.layers.0.self_attn.q_proj`. Layout:
the rows of each query and key head are interleaved (row 2 j and 2 j + 1 of a head are rows j and
j + D / 2 of the original), since llama.cpp rotates neighbours where Hugging Face rotates halves.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ConfigError, WeightsError
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_config import ROPE_FACTORS, generation_config, llama_config

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """Implements `weights.loader.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        architecture = self._file.metadata.get("general.architecture")
        if architecture != "llama":
            raise ConfigError(
                f"GGUF file {path}: general.architecture is {repr(architecture)[:80]}; supported: llama"
            )
        self._config = llama_config(self._file)
        self._gguf_names = {_hf_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}

    def names(self) -> frozenset[str]:
        return frozenset(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def load_into(self, name: str, destination: torch.Tensor) -> None:
        stored = self._gguf_names.get(name)
        if stored is None:
            raise WeightsError(f"GGUF file {self.path}: it has no tensor '{name}'")
        shape = self._file.tensors[stored].shape
        if shape != tuple(destination.shape):
            raise self._file.error(
                f"its shape is {list(shape)}, the model needs {list(destination.shape)} for '{name}'", stored
            )
        heads = self._interleaved_heads(name)
        if heads and shape[0] % (2 * heads):
            raise self._file.error(f"its {shape[0]} rows are not those of {heads} heads of even size", stored)
        if len(shape) == 1:
            (_, values), *_ = self._file.decode(stored)
            vector = values[0] if heads is None else values[0, _original_order(shape[0], heads)]
            destination.copy_(torch.from_numpy(vector))
            return
        order = None if heads is None else _original_order(shape[0], heads)
        for start, rows in self._file.decode(stored, order):
            destination[start : start + len(rows)].copy_(torch.from_numpy(rows))

    def _interleaved_heads(self, name: str) -> int | None:
        if ".self_attn.q_proj." in name:
            return int(self._config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return int(self._config["num_key_value_heads"])
        return None

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        return generation_config(self._file.metadata)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own when it has none (the loader then says it is left over)."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[part]}.{kind}" if part in _OUTSIDE else name


def _original_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """For each row of the original the row of the file that holds it: [num_rows]."""
    rows = np.arange(num_rows, dtype=np.intp)
    return rows.reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
