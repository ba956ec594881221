"""Finds a tritonserver on this machine and assembles the backend folder that it is started with.

Owns where a server may come from (an installed one first, else the one inside the `nvidia-pytriton` wheel),
what its Python backend needs (a stub for the running Python, its numpy), and the cache folder in which the
backends lie. Neither the installed server nor site-packages is ever written to. Used by `launcher` only.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LaunchError
from octavo.serving import preflight

INSTALLED = Path("/opt/tritonserver")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# All that a Python-based backend consists of: `backend: "octavo"` then needs no model.py in a repository.
BACKEND_MODEL = '''"""The Octavo backend: a model repository that names it needs no model.py of its own."""

from octavo.serving.tritonserver import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver that this Python can serve with.

    `backends` maps a backend's name to its folder; `stub` replaces the one in the python backend's folder
    when it is not None; `library_folders` go to LD_LIBRARY_PATH; `note` is worth a line to the user.
    """

    executable: Path
    backends: Mapping[str, Path]
    stub: Path | None
    library_folders: tuple[Path, ...]
    cache_folder: Path | None
    repoagent_folder: Path | None
    version: str
    note: str | None = None


def find(installed: Path = INSTALLED) -> Installation:
    """An installed server if its stub was built for this Python, else the wheel's. Raises `LaunchError`."""
    problem = preflight.libpython_problem()
    if problem:
        raise LaunchError(problem)
    note = None
    if (installed / "bin/tritonserver").exists():
        embedded = stub_python(installed / "backends/python/triton_python_backend_stub")
        if embedded == PYTHON:
            return _installed(installed)
        what = f"is built for Python {embedded}" if embedded else "is missing"
        note = f"the Python backend stub of {installed} {what} and this is Python {PYTHON}"
    if importlib.util.find_spec("pytriton") is None:
        why = f"{note}, and" if note else f"there is none at {installed}, and"
        raise LaunchError(
            f"no tritonserver to start: {why} the nvidia-pytriton package is not installed; "
            "pip install 'octavo[serve]', or name an installed server with --tritonserver"
        )
    return _wheel(f"{note}: using the nvidia-pytriton package instead" if note else None)


def require_extra() -> None:
    """For a module that needs the `serve` extra: fails as an import of what is missing would, but imports
    nothing, since torch takes a second. Raises `ModuleNotFoundError`."""
    for name in ("torch", "tokenizers", "safetensors", "gguf", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def stub_python(stub: Path) -> str | None:
    """The Python version, such as "3.12", that a stub binary embeds; None when there is no such file."""
    try:
        found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def numpy_problem(version: str) -> str | None:
    """The wheel's stub is built against numpy 1: under numpy 2 the first string tensor kills it."""
    if int(version.split(".")[0]) < 2:
        return None
    return (
        f"numpy {version} is installed, and the tritonserver of nvidia-pytriton works with numpy 1 only "
        "(with numpy 2 the first request would kill the model): pip install 'numpy<2'"
    )


def _installed(root: Path) -> Installation:
    folders = {path.name: path for path in (root / "backends").iterdir() if path.is_dir()}
    version = root / "TRITON_VERSION"
    return Installation(
        executable=root / "bin/tritonserver",
        backends=folders,
        stub=None,
        library_folders=(root / "lib",),
        cache_folder=_if_exists(root / "caches"),
        repoagent_folder=_if_exists(root / "repoagents"),
        version=version.read_text().strip() if version.exists() else "of unknown version",
    )


def _wheel(note: str | None) -> Installation:
    distribution = importlib.metadata.distribution("nvidia-pytriton")
    root = Path(str(distribution.locate_file("pytriton/tritonserver")))
    executable = root / "bin/tritonserver"
    if not executable.exists():
        raise LaunchError(
            f"the nvidia-pytriton package {distribution.version} lacks {executable}: "
            "it comes for x86-64 and arm64 Linux only; reinstall it, or name a server with --tritonserver"
        )
    stub = root / f"python_backend_stubs/{PYTHON}/triton_python_backend_stub"
    if not stub.exists():
        known = sorted((p.name for p in stub.parents[1].iterdir()), key=lambda name: int(name.split(".")[1]))
        raise LaunchError(
            f"the nvidia-pytriton package {distribution.version} has no stub for Python {PYTHON}; "
            f"it has them for {', '.join(known)}: make the environment with one of these"
        )
    problem = numpy_problem(importlib.metadata.version("numpy"))
    if problem:
        raise LaunchError(problem)
    return Installation(
        executable=executable,
        backends={"python": root / "backends/python"},
        stub=stub,
        library_folders=(root.parents[1] / "nvidia_pytriton.libs",),
        cache_folder=_if_exists(root / "caches"),
        repoagent_folder=None,
        version=f"of nvidia-pytriton {distribution.version}",
        note=note,
    )


def cache_root() -> Path:
    """$OCTAVO_CACHE, else octavo/ under $XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise LaunchError(f"no folder to cache in: {error}; set OCTAVO_CACHE to one") from error
    return Path(base) / "octavo"


def assemble_backends(installation: Installation, names: Iterable[str], root: Path | None = None) -> Path:
    """The folder for --backend-directory: every backend of the server, and Octavo under each of `names`.

    Built beside its place and renamed into it, so that servers that start at once share one folder without
    a lock, and a start that was cut short leaves nothing half made. Its name holds a digest of all that it
    is made from. Raises `LaunchError` when the cache cannot be written.
    """
    names = sorted(set(names))
    made_from = [installation.version, PYTHON, BACKEND_MODEL, *names, str(installation.stub)]
    made_from += [f"{name}={path}" for name, path in sorted(installation.backends.items())]
    digest = hashlib.blake2b("\0".join(made_from).encode(), digest_size=8).hexdigest()
    root = (root or cache_root()) / "backends"
    target = root / f"python{PYTHON}-{digest}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch:
            new = Path(scratch) / "backends"
            _fill(new, installation, names)
            try:
                new.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another server was faster, with the same content
                    raise
    except OSError as error:
        raise LaunchError(
            f"the server's backends cannot be laid out under {root}: {error.strerror}; "
            "set OCTAVO_CACHE to a folder that can be written"
        ) from error
    return target


def _fill(new: Path, installation: Installation, names: Iterable[str]) -> None:
    new.mkdir()
    for name, folder in installation.backends.items():
        if name == "python" and installation.stub is not None:
            shutil.copytree(folder, new / name, ignore=shutil.ignore_patterns("__pycache__"))
            stub = new / name / "triton_python_backend_stub"
            shutil.copyfile(installation.stub, stub)
            stub.chmod(0o755)
        elif name not in names:
            (new / name).symlink_to(folder.resolve(), target_is_directory=True)
    for name in names:
        (new / name).mkdir()
        (new / name / "model.py").write_text(BACKEND_MODEL)


def environment(installation: Installation, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's environment: its libraries, and a stub that wakes up as this Python with its packages.

    An embedded interpreter looks for `python3` on PATH and takes that one's prefix, so the folder of ours
    comes first there; that finds a virtual environment with its .pth files and leaves `sys.executable` true.
    Where this Python is no `python3` of its folder, PYTHONHOME and PYTHONPATH say the same.
    """
    libraries = [str(folder) for folder in installation.library_folders]
    libraries += [preflight.libpython_folder() or "", base.get("LD_LIBRARY_PATH", "")]
    folder = Path(sys.executable).parent
    changed = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": os.pathsep.join(filter(None, (str(folder), base.get("PATH", "")))),
    }
    if (folder / "python3").resolve() != Path(sys.executable).resolve():
        changed["PYTHONHOME"] = f"{sys.base_prefix}:{sys.base_exec_prefix}"
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return {**base, **changed}


def _if_exists(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None
