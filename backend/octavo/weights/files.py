"""Finds what an operator wrote as `model`, reads the JSON files beside weights, and tells weights apart.

Torch-free.
"""

import json
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

_PACKAGE_SCHEME = "pkg://"
_MAX_JSON_BYTES = 64 * 2**20  # an index names each tensor once: the largest known ones have about 10 MB
_SAMPLES = 64  # of a file that is too large to be read whole, spread evenly, both its ends among them
_SAMPLE_BYTES = 4096


def resolve_model_path(model: str) -> Path:
    """The file or folder that `model` names.

    `pkg://PACKAGE/FILE` is FILE inside an installed Python package, which is looked up and never imported;
    anything else is a path, `~` allowed. Raises `ConfigError` when there is nothing there.
    """
    if not model.startswith(_PACKAGE_SCHEME):
        try:
            path = Path(model).expanduser()
            if path.exists():
                return path
        except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, or `~` of nobody
            raise ConfigError(f"'model' is {model[:200]!r}, which is not a usable path: {error}") from None
        raise ConfigError(
            f"'model' is {model[:200]!r}: no such file or folder; give a GGUF file, a Hugging Face folder or "
            f"{_PACKAGE_SCHEME}PACKAGE/FILE"
        )
    package, _, name = model.removeprefix(_PACKAGE_SCHEME).partition("/")
    if not package.isidentifier() or not name:
        raise ConfigError(f"'model' is {model[:200]!r}; it must be {_PACKAGE_SCHEME}PACKAGE/FILE")
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ConfigError(
            f"'model' is {model[:200]!r}: the Python package '{package}' is not installed in this environment"
        )
    for folder in folders:
        path = Path(folder, name)
        if path.resolve().is_relative_to(Path(folder).resolve()) and path.exists():
            return path
    raise ConfigError(f"'model' is {model[:200]!r}: the package '{package}' has no file {name[:200]!r}")


def read_json_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; an empty one when the file is absent and not `required`.

    Raises `ConfigError` that names the file.
    """
    if not required and not path.exists():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(f"{path}: it is larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: it must hold a JSON object, not a {type(content).__name__}")
    return content


def sample_digest(path: Path) -> str:
    """Digits that tell a file from others of its size, by samples of its bytes. Raises `OSError`."""
    digest = blake2b(digest_size=16)
    last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
