"""What fits, told from a checkpoint's files: the figures that the worker itself comes to."""

import ctypes
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import resolve
from octavo.errors import ConfigError
from octavo.models.model_config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.loader import load_weights, open_checkpoint
from octavo.worker import capacity
from octavo.worker.capacity import estimate, num_weight_bytes
from octavo.worker.executor import LocalExecutor, resolve_scheme
from tiny import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


def test_the_figures_are_those_of_the_worker(folder: str) -> None:
    arguments = {"model": folder, "device": "cpu", "dtype": "float32", "num_threads": 1}
    config = resolve({**arguments, "max_num_seqs": 3, "max_model_len": 100})
    estimated = estimate(config)
    checkpoint = open_checkpoint(folder)
    model_config = ModelConfig.from_dict(checkpoint.config())
    executor = LocalExecutor(config.for_model(1024), checkpoint, model_config)
    assert estimated.num_blocks == executor.num_blocks == 3 * 7
    assert estimated.kv_bytes_per_token == executor.block_bytes // 16 == 2 * 3 * 2 * 16 * 4
    assert estimated.limit == executor.kv_limit
    assert (estimated.num_layers, estimated.dtype, estimated.device) == (3, "float32", "cpu")
    assert estimated.max_concurrency == pytest.approx(21 * 16 / 100)
    executor.close()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_quantised_cache_is_counted_with_its_scales(folder: str, name: str) -> None:
    """Two bytes for each token and head of size 16, in 3 layers with 2 KV heads."""
    arguments = {"model": folder, "device": "cpu", "max_model_len": 100, "kv_cache_memory_bytes": 2**16}
    config = resolve({**arguments, "num_threads": 1, "kv_cache_dtype": name})
    estimated = estimate(config)
    checkpoint = open_checkpoint(folder)
    executor = LocalExecutor(config, checkpoint, ModelConfig.from_dict(checkpoint.config()))
    assert estimated.kv_bytes_per_token == executor.block_bytes // 16 == 2 * 3 * 2 * (16 + 2)
    assert estimated.num_blocks == executor.num_blocks == 2**16 // (16 * 2 * 3 * 2 * (16 + 2))
    executor.close()


def memory_of(model: Any) -> int:
    """Bytes of all tensors that a model holds, however deep; what two of them share is counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, type, ctypes.CDLL)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.data_ptr()] = item.nbytes
        elif isinstance(item, (list, tuple)):
            waiting += item
        else:
            waiting += vars(item).values() if hasattr(item, "__dict__") else []
            waiting += [getattr(item, name) for name in getattr(type(item), "__slots__", ())]
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_take_what_a_loaded_model_holds(
    tmp_path: Path, dtype: torch.dtype, quantization: str | None, tied: bool
) -> None:
    """But for packing's padding: these sizes are whole panels, so there is none."""
    tiny_llama(tmp_path, hidden_size=288, intermediate_size=512, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(str(tmp_path))
    model_config = ModelConfig.from_dict(checkpoint.config())
    device, scheme = torch.device("cpu"), resolve_scheme(quantization)
    model = build_model(model_config, dtype, device, scheme=scheme)
    load_weights(model.weight_map(), checkpoint)
    model.finish_loading()
    assert num_weight_bytes(model_config, scheme, dtype, device) == pytest.approx(memory_of(model), rel=0.02)


def test_weights_are_counted_before_the_rest_is_given_to_the_cache(folder: str) -> None:
    config = resolve({"model": folder, "device": "cpu", "dtype": "float32", "max_model_len": 64})
    weight_bytes = estimate(config).weight_bytes
    checkpoint = open_checkpoint(folder)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    head = math.prod(shapes["model.embed_tokens.weight"])  # a packed copy of the embedding
    assert weight_bytes == 4 * (sum(map(math.prod, shapes.values())) + head)
    int8_bytes = estimate(dataclasses.replace(config, quantization="int8")).weight_bytes
    linear = [shape for shape in shapes.values() if len(shape) == 2]
    assert weight_bytes - int8_bytes == sum(rows * (3 * columns - 4) for rows, columns in linear)
    per_block = 16 * estimate(config).kv_bytes_per_token
    assert estimate(config, available=lambda: weight_bytes + 4 * 9 * per_block).num_blocks == 9
    with pytest.raises(ConfigError, match="less than one sequence of 'max_model_len'"):
        estimate(config, available=lambda: weight_bytes)


def test_a_gpus_memory_is_shared_with_weights_and_with_others(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6_000_000, 10_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = resolve({"model": folder, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 10**4 // 5})
    found = estimate(config)
    # Of ten million bytes others hold four, and a fiftieth stays free.
    budget = 10_000_000 - 4_000_000 - found.weight_bytes - 200_000
    assert found.num_blocks == budget // (16 * found.kv_bytes_per_token)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        estimate(resolve({"model": str(tmp_path / "absent")}))
