"""Opens checkpoints and fills models from them: what the engine and the worker use of `weights`.

A checkpoint, whatever its format, speaks Hugging Face: a `config.json`, tensor names and layouts. A model
says where each of those tensors goes (views into its fused parameters); nothing here knows more of it.
"""

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.errors import ConfigError, WeightsError
from octavo.weights.files import resolve_model_path
from octavo.weights.gguf import MAGIC
from octavo.weights.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.safetensors import SafetensorsCheckpoint

__all__ = ["Checkpoint", "load_weights", "open_checkpoint", "resolve_model_path"]

# Tensors that some files carry and no model needs: they are computed from the configuration.
_HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_NAMES_IN_AN_ERROR = 5


class Checkpoint(Protocol):
    """Weights on disk, under their Hugging Face names. Safe to read from several threads."""

    @property
    def path(self) -> Path: ...

    def config(self) -> dict[str, Any]:
        """The content of its `config.json`. Raises `ConfigError`."""

    def generation_config(self) -> dict[str, Any]:
        """The content of its `generation_config.json`; empty when it has none."""

    def names(self) -> frozenset[str]:
        """Of all its tensors, such as `model.layers.0.self_attn.q_proj.weight`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names()`."""

    def load_into(self, name: str, destination: torch.Tensor) -> None:
        """Copies a tensor, converted to the destination's dtype and device, a few megabytes at a time.

        Raises `WeightsError` that names the file, the tensor and the reason: not there, another shape, a type
        that cannot be converted.
        """


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face folder; `model` is as `resolve_model_path` takes it.

    Nothing of the weights' size is read or allocated. The sizes that the configuration claims are checked
    against the tensors that are there, so that a model may be allocated by it. Raises `ConfigError` or
    `WeightsError`.
    """
    path = resolve_model_path(model)
    checkpoint: Checkpoint
    if path.is_dir():
        checkpoint = SafetensorsCheckpoint(path)
    else:
        _require_gguf(path)
        checkpoint = GGUFCheckpoint(path)
    _check_claims(checkpoint)
    return checkpoint


def load_weights(weight_map: Iterable[tuple[str, torch.Tensor]], checkpoint: Checkpoint) -> None:
    """Fills every destination from the tensor of its name.

    Raises `WeightsError` that names the tensors when some are missing, when some are left over (the model
    would not be the one that was saved), or when one cannot be loaded.
    """
    destinations = dict(weight_map)
    names = checkpoint.names()
    left_over = {name for name in names - destinations.keys() if not _HARMLESS.fullmatch(name)}
    if checkpoint.config().get("tie_word_embeddings"):
        left_over.discard("lm_head.weight")  # a copy of the embedding, which some files carry all the same
    if missing := destinations.keys() - names:
        raise WeightsError(f"{checkpoint.path}: it lacks {_listed(missing)}")
    if left_over:
        raise WeightsError(f"{checkpoint.path}: the model has no use for {_listed(left_over)}")
    with torch.no_grad():
        for name, destination in destinations.items():
            checkpoint.load_into(name, destination)


def _listed(names: AbstractSet[str]) -> str:
    more = len(names) - _NAMES_IN_AN_ERROR
    shown = ", ".join(f"'{name[:100]}'" for name in sorted(names)[:_NAMES_IN_AN_ERROR])
    return f"the tensors {shown}" + (f" and {more} more" if more > 0 else "")


def _require_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise WeightsError(f"{path}: it cannot be opened: {error.strerror or error}") from None
    if magic == MAGIC:
        return
    if path.suffix in (".bin", ".pt", ".pth"):
        reason = "pickles can run code when they are read, so they are refused; save the model as safetensors"
    elif path.suffix in (".safetensors", ".json"):
        reason = f"give the folder that it is in, {path.parent}"
    else:
        reason = f"it is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
    raise WeightsError(f"{path}: {reason}")


def _check_claims(checkpoint: Checkpoint) -> None:
    """Compares the sizes in the configuration with the first and last layer's tensors."""
    config, names = checkpoint.config(), checkpoint.names()
    hidden_size, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    expected = {"model.embed_tokens.weight": ("vocab_size", config.get("vocab_size"), hidden_size)}
    if type(layers) is int:
        gate = "model.layers.{}.mlp.gate_proj.weight"
        if gate.format(0) in names and gate.format(layers - 1) not in names:
            raise ConfigError(
                f"{checkpoint.path}: the configuration has num_hidden_layers {layers}, but there is no "
                f"tensor '{gate.format(layers - 1)}'"
            )
        expected[gate.format(0)] = ("intermediate_size", config.get("intermediate_size"), hidden_size)
    head_size = config.get("head_dim")
    for key, projection in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads = config.get(key)
        if type(heads) is int and type(head_size) is int:
            name = f"model.layers.0.self_attn.{projection}.weight"
            expected[name] = (f"{key} x head_dim", heads * head_size, hidden_size)
    for name, (key, rows, columns) in expected.items():
        if name in names and checkpoint.shape(name) != (rows, columns):
            raise ConfigError(
                f"{checkpoint.path}: the configuration has {key} {rows!r} and hidden_size {columns!r}, but "
                f"tensor '{name}' has the shape {list(checkpoint.shape(name))}"
            )
