"""A Hugging Face folder: config.json, generation_config.json and weights in safetensors, sharded or not.

`weights.loader.open_checkpoint` makes one. Files are mapped by the safetensors library, which checks a
file's header against its size when it is opened; tensors are copied a few megabytes at a time.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import WeightsError
from octavo.weights.files import read_json_object

_DTYPES = ("F32", "BF16", "F16")
_CHUNK_WEIGHTS = 2**20  # copied at a time


class SafetensorsCheckpoint:
    """Implements `weights.loader.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json_object(path / "config.json")
        self._generation_config = read_json_object(path / "generation_config.json", required=False)
        self._shards: dict[str, Any] = {}  # tensor name -> the open file that holds it
        index = path / "model.safetensors.index.json"
        if (path / "model.safetensors").exists():
            opened = _open(path / "model.safetensors")
            self._shards = dict.fromkeys(opened.keys(), opened)
        elif index.exists():
            self._open_shards(index)
        else:
            raise WeightsError(f"{path}: {_why_no_weights(path)}")

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise WeightsError(f"{index}: 'weight_map' must be an object of tensor names to file names")
        opened: dict[str, Any] = {}
        held: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            if shard not in opened:
                if Path(shard).name != shard:
                    raise WeightsError(f"{index}: '{shard[:200]}' is not the name of a file in this folder")
                if not (index.parent / shard).exists():
                    raise WeightsError(f"{index}: the shard '{shard}' (tensor '{name}') is missing")
                opened[shard] = _open(index.parent / shard)
                held[shard] = set(opened[shard].keys())
            if name not in held[shard]:
                raise WeightsError(
                    f"{index.parent / shard}: it has no tensor '{name}', which the index promises"
                )
            self._shards[name] = opened[shard]

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        return dict(self._generation_config)

    def names(self) -> frozenset[str]:
        return frozenset(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shards[name].get_slice(name).get_shape())

    def load_into(self, name: str, destination: torch.Tensor) -> None:
        if name not in self._shards:
            raise WeightsError(f"{self.path}: it has no tensor '{name}'")
        stored = self._shards[name].get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != tuple(destination.shape):
            raise self._error(name, f"its shape is {list(shape)}, the model needs {list(destination.shape)}")
        if dtype not in _DTYPES:
            raise self._error(name, f"its type is {dtype}; supported: {', '.join(_DTYPES)}")
        step = max(1, _CHUNK_WEIGHTS // max(1, math.prod(shape[1:])))
        try:
            for start in range(0, shape[0], step):
                destination[start : start + step].copy_(stored[start : start + step])
        except (SafetensorError, RuntimeError) as error:
            raise self._error(name, str(error)) from None

    def _error(self, name: str, reason: str) -> WeightsError:
        return WeightsError(f"{self.path}, tensor '{name}': {reason}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: it is not a whole safetensors file: {error}") from None


def _why_no_weights(path: Path) -> str:
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    wanted = "model.safetensors or model.safetensors.index.json"
    if not pickles:
        return f"the folder has no {wanted}"
    return (
        f"the folder has no {wanted}, only {', '.join(pickles[:3])}: such files are pickles, which can run "
        "code when they are read, so they are refused; save the model as safetensors"
    )
