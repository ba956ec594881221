"""The shape of the source tree: who may import whom, what must work without torch, how long a file may be."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("backend", "kernels", "client")
FOLDERS = ("model_repository", "backend", "kernels", "client", "loadtest", "docker", "tests")
SKIPPED_FOLDERS = {
    ".git",
    "build",
    ".venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "dist",
}
LONGEST_FILE_LINES = 400  # beyond 300, look for the missing concept

# The layers, from the top down. A module may import its own layer and those below it.
LAYERS = ("serving", "engine", "worker", "models", "layers", "quant", "octavo_kernels")
BASE = {"errors", "config", "request", "protocol", "values"}  # every module of the engine may import these
# Beside the layers: what may import it, and what it may import.
WEIGHTS_IMPORTED_BY = {"engine", "worker", "weights"}
WEIGHTS_IMPORTS = {"weights", "quant", "errors"}
# Packages that import nothing of ours but what is named.
ALONE = {"octavo_kernels": set(), "octavo_client": set(), "octavo_gateway": {"octavo_client"}}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of our packages, such as ("octavo.engine.engine", its path)."""
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = path.relative_to(ROOT / root).with_suffix("").parts
            if parts[0].startswith("octavo"):
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(source: str) -> set[str]:
    """The absolute names of what a module imports from our packages, wherever in it, for types as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "a relative import hides the layer that it crosses"
            assert node.level == 0, "a relative import hides the layer that it crosses"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("octavo")}


def layer(name: str) -> str:
    """The unit that the import rule speaks of: a folder or base module of `octavo`, or another package."""
    parts = name.split(".")
    if parts[0] != "octavo":
        return parts[0]
    return parts[1] if len(parts) > 1 else "octavo"


def forbidden(importer: str, imported: str) -> bool:
    source, target = layer(importer), layer(imported)
    if source in ALONE:
        return target != source and target not in ALONE[source]
    if source == "octavo":
        return False  # the package itself re-exports its public names
    if source in BASE:
        return target not in BASE
    if source == "weights":
        return target not in WEIGHTS_IMPORTS
    if target == "weights":
        return source not in WEIGHTS_IMPORTED_BY
    if target in BASE:
        return False
    if target not in LAYERS or source not in LAYERS:
        return True
    return LAYERS.index(target) < LAYERS.index(source)


def test_imports_go_downward_only() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        for imported in sorted(imports_of(path.read_text()))
        if forbidden(name, imported)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("octavo.serving.cli", "octavo.engine.engine.Engine", False),
        ("octavo.serving.cli", "octavo.worker.executor", False),
        ("octavo.engine.engine", "octavo.serving.codec", True),
        ("octavo.models.llama", "octavo.layers.linear", False),
        ("octavo.layers.linear", "octavo.models.llama", True),
        ("octavo.quant.base", "octavo_kernels.ops", False),
        ("octavo.worker.executor", "octavo.weights.loader", False),
        ("octavo.models.llama", "octavo.weights.loader", True),
        ("octavo.weights.loader", "octavo.config.EngineConfig", True),
        ("octavo.weights.loader", "octavo.errors.WeightsError", False),
        ("octavo.config", "octavo.errors.ConfigError", False),
        ("octavo.config", "octavo.engine.engine", True),
        ("octavo_kernels.ops", "octavo.errors", True),
        ("octavo_client.cli", "octavo.serving.cli", True),
        ("octavo_gateway.app", "octavo_client._client", False),
        ("octavo.engine.engine", "octavo_client.cli", True),
        ("octavo.somewhere.new", "octavo.engine.engine", True),
    ],
)
def test_the_import_rule_itself(importer: str, imported: str, wrong: bool) -> None:
    assert forbidden(importer, imported) is wrong


def test_top_level_folders_are_no_packages() -> None:
    """A `kernels/__init__.py` at the root shadows a package that transformers imports."""
    assert [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    packages = [
        str(path.parent.relative_to(ROOT))
        for root in SOURCE_ROOTS
        for path in (ROOT / root).glob("*/__init__.py")
    ]
    assert sorted(declared) == sorted(packages)
    assert all((ROOT / package / "py.typed").exists() for package in packages)


def test_the_engine_is_free_of_torch_but_for_one_module() -> None:
    """Its property tests run in milliseconds because importing it costs nothing."""
    names = [
        name for name, _ in modules() if name.startswith("octavo.engine") and name != "octavo.engine.engine"
    ]
    names += ["octavo", "octavo.config", "octavo.request", "octavo.protocol", "octavo.weights.gguf"]
    names += ["octavo.models.model_config", "octavo_client.cli"]
    program = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise AssertionError("torch was imported")
sys.meta_path.insert(0, Blocker())
failed = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except AssertionError:
        failed.append(name)
print(failed)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    assert ran.stdout == "[]\n"


def test_no_file_is_too_long_to_read_at_once() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for _, path in modules()}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def test_every_module_says_what_it_owns() -> None:
    silent = [name for name, path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def project_files() -> Iterator[Path]:
    """Every text file of the project, whether or not it lies in a git checkout."""
    pending = [ROOT]
    while pending:
        for path in pending.pop().iterdir():
            if path.is_dir():
                if path.name not in SKIPPED_FOLDERS:
                    pending.append(path)
            elif path.suffix not in {".png", ".gif", ".so", ".gguf", ".safetensors"} and path.name != ".git":
                yield path


REGISTRIES = ("pypi", "pythonhosted", "download.pytorch", "registry.npmjs", "deb.debian", "conda.anaconda")
OUTSIDE = re.compile(
    rf"\b(?:{'|'.join(map(re.escape, REGISTRIES))})\.org|(?<![\w.~}}/])/(?:root|home/\w+|work|Users|tmp)/"
)


def test_no_file_names_a_place_outside_the_project() -> None:
    """Neither a folder of somebody's machine nor the host of a package registry: users choose both."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for match in OUTSIDE.finditer(line)
    ]
    assert found == []


def test_what_counts_as_a_place_outside() -> None:
    for place in ("tmp", "work", "root", "home/jo"):
        assert OUTSIDE.search(f'open("/{place}/x")')
    assert OUTSIDE.search("index-url = https://" + "pypi" + ".org/simple")
    assert not OUTSIDE.search("~/.cache/octavo /opt/tritonserver /dev/shm {folder}/tmp/x ./work/x")
