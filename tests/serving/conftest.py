"""A Triton that is not there: the fixtures that drive `TritonPythonModel` without a server."""

import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fake_engine import FakeEngine
from fakes import FakeTriton, Load, LoadedModel


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    """Stands where `triton_python_backend_utils` is imported from, for the length of a test."""
    fake = FakeTriton()
    monkeypatch.setitem(sys.modules, fake.module.__name__, fake.module)
    monkeypatch.delitem(sys.modules, "octavo.serving.tritonserver", raising=False)
    return fake


@pytest.fixture
def glue(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module under test, with the engine that counts in place of the real one."""
    module = importlib.import_module("octavo.serving.tritonserver")
    monkeypatch.setattr("octavo.engine.engine.Engine", FakeEngine)
    return module


@pytest.fixture
def load(glue: ModuleType, tmp_path: Path) -> Iterator[Load]:
    """`load(model_json, args, **config)`, where `args` are changes to what Triton passes; whatever was loaded
    is finalized, and must leave no thread behind."""
    models: list[LoadedModel] = []
    threads = set(threading.enumerate())

    def load(model_json: Any = None, args: Mapping[str, str] | None = None, **config: Any) -> LoadedModel:
        folder = tmp_path / "llm" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        text = model_json if isinstance(model_json, str) else json.dumps(model_json or {"model": "m.gguf"})
        (folder / "model.json").write_text(text)
        model = glue.TritonPythonModel()
        model.initialize(
            {
                "model_name": "llm",
                "model_version": "1",
                "model_instance_name": "llm_0_0",
                "model_instance_kind": "MODEL",
                "model_instance_device_id": "0",
                "model_repository": str(tmp_path / "llm"),
                "model_config": json.dumps(config),
                **(args or {}),
            }
        )
        models.append(LoadedModel(model))
        return models[-1]

    yield load
    for model in reversed(models):
        model.engine.running.set()
        model.engine.tokenizer.released.set()
        model.finalize()
        assert model.engine.closed
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def llm(load: Load) -> LoadedModel:
    return load({"model": "m.gguf"}, parameters={"shutdown_timeout_s": {"string_value": "0.2"}})
