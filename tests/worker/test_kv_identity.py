"""Two instances share KV blocks only where all that decides their bytes is the same."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.weights.loader import open_checkpoint
from octavo.worker.kv_identity import fingerprint
from tiny import tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the same shape, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        tiny_llama(folder / str(seed), seed=seed)
        os.utime(folder / str(seed) / "model.safetensors", (1, 1))  # as files are that come out of an image
    return folder


def of(folder: Path, **changes: Any) -> bytes:
    how = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "quantization": None,
        "block_size": 16,
        "device": torch.device("cpu"),
    }
    return fingerprint(open_checkpoint(str(folder)), **{**how, **changes})


def test_a_copy_of_a_model_is_the_same_model(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "0", tmp_path / "copy")
    assert of(tmp_path / "copy") == of(models / "0")
    assert len(of(models / "0")) == 16


def test_weights_and_configuration_tell_models_apart(models: Path, tmp_path: Path) -> None:
    assert of(models / "0") != of(models / "1")
    shutil.copytree(models / "0", tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert of(tmp_path / "copy") != of(models / "0")


def test_weights_that_were_written_anew_are_others(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "0", tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors")
    assert of(tmp_path / "copy") != of(models / "0")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": torch.int8},
        {"quantization": "int8"},
        {"block_size": 8},
        {"device": torch.device("cuda")},
    ],
)
def test_how_blocks_are_computed_and_kept_tells_them_apart(models: Path, change: dict[str, Any]) -> None:
    assert of(models / "0", **change) != of(models / "0")
