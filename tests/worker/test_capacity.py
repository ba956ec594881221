"""What fits, told from a checkpoint's files: the figures that the worker itself comes to."""

from pathlib import Path

import pytest
import torch

from octavo.config import resolve
from octavo.errors import ConfigError
from octavo.models.model_config import ModelConfig
from octavo.weights.loader import open_checkpoint
from octavo.worker import capacity
from octavo.worker.capacity import estimate
from octavo.worker.executor import LocalExecutor
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


def test_weights_are_counted_before_the_rest_is_given_to_the_cache(folder: str) -> None:
    config = resolve({"model": folder, "device": "cpu", "dtype": "float32", "max_model_len": 64})
    weight_bytes = estimate(config).weight_bytes
    checkpoint = open_checkpoint(folder)
    elements = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names())
    assert weight_bytes == 4 * elements
    per_block = 16 * estimate(config).kv_bytes_per_token
    assert estimate(config, available=lambda: weight_bytes + 4 * 9 * per_block).num_blocks == 9
    with pytest.raises(ConfigError, match="less than one sequence of 'max_model_len'"):
        estimate(config, available=lambda: weight_bytes)


def test_a_gpus_memory_is_shared_with_weights_and_with_others(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6_000_000, 10_000_000))
    config = resolve({"model": folder, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 10**4 // 5})
    found = estimate(config)
    budget = int(10_000_000 * 0.9) - found.weight_bytes - 4_000_000
    assert found.num_blocks == budget // (16 * found.kv_bytes_per_token)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        estimate(resolve({"model": str(tmp_path / "absent")}))
