"""The tiny model that engines are tested on, made once for each file."""

from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_llama


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    return path, tiny_llama(path)


@pytest.fixture(scope="module")
def folder(tiny_model: tuple[Path, Any]) -> Path:
    """Where it lies."""
    return tiny_model[0]


@pytest.fixture(scope="module")
def reference(tiny_model: tuple[Path, Any]) -> Any:
    """The same in Transformers."""
    return tiny_model[1]
