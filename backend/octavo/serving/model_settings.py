"""What an operator wrote about a model: parameters of config.pbtxt, 1/model.json, 1/multi_lora.json.

The names are those of Triton's vLLM backend where it has them. Read by `tritonserver` when a model is loaded
and by `check` without a server, so that both say the same of it. Torch-free.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.serving import strict_json

SHUTDOWN_TIMEOUT_S = 20.0  # Triton's own, --exit-timeout-secs, is 30 by default
# The launcher says here how long, since Triton does not pass its own deadline on.
SHUTDOWN_TIMEOUT_VARIABLE = "OCTAVO_SHUTDOWN_TIMEOUT_S"

# Every parameter of config.pbtxt that means something here, with what it decides.
PARAMETERS = {
    "REPORT_CUSTOM_METRICS": "whether the engine's metrics are in the server's; true by default",
    "ENABLE_VLLM_HEALTH_CHECK": "whether an engine that cannot go on unloads its model; false by default",
    "GPU_DEVICE_IDS": "the GPU that an instance of KIND_MODEL takes",
    "shutdown_timeout_s": "how long requests in flight may take when the model is unloaded",
    "coalesce_responses": "whether what waits for a stream becomes one response; true by default",
    "request_log": "whether requests are logged, as lines of JSON: json, or off, the default",
}
# Those that Triton's Python backend reads itself.
PYTHON_BACKEND_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})

_YES, _NO = ("true", "yes"), ("false", "no")


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of config.pbtxt, checked."""

    shutdown_timeout_s: float
    coalesce_responses: bool
    report_metrics: bool
    check_health: bool
    gpu_ids: tuple[int, ...]
    log_requests: bool

    @classmethod
    def read(cls, parameters: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> "Settings":
        """Raises `ConfigError` that names a parameter, its value and what is allowed."""
        return cls(
            shutdown_timeout_s=_shutdown_timeout_s(parameters, environ),
            coalesce_responses=_choice(parameters, "coalesce_responses", _COALESCE, "true") == "true",
            report_metrics=_switch(parameters, "REPORT_CUSTOM_METRICS", default=True),
            check_health=_switch(parameters, "ENABLE_VLLM_HEALTH_CHECK", default=False),
            gpu_ids=_gpu_ids(parameters),
            log_requests=_choice(parameters, "request_log", _LOG, "off") == "json",
        )


def parameters_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Of a model configuration as Triton passes it: JSON."""
    values = config.get("parameters") or {}
    return {name: str(value.get("string_value", "")) for name, value in values.items()}


def engine_arguments(path: Path) -> dict[str, Any]:
    """The engine's arguments. Paths in the file are relative to its folder. Raises `ConfigError`."""
    arguments = _json_object(path, "it holds the engine's arguments, as JSON")
    for key in ("model", "tokenizer", "record_steps"):
        value = arguments.get(key)
        if isinstance(value, str) and value and "://" not in value and not value.startswith("~"):
            arguments[key] = str(path.parent / value)  # which an absolute path survives
    return arguments


def adapters(folder: Path) -> dict[str, str]:
    """The LoRA adapters that multi_lora.json in a version's folder names, and where they lie; none when there
    is no such file. Raises `ConfigError`."""
    path = folder / "multi_lora.json"
    if not path.exists():
        return {}
    found = _json_object(path, "it names LoRA adapters and their folders, as JSON")
    for name, place in found.items():
        if not name or not isinstance(place, str) or not place:
            raise ConfigError(f"{path}: '{name[:80]}' is {repr(place)[:80]}; expected the adapter's folder")
    return found


def refuse_adapters(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raises `ConfigError` when a model asks for adapters, which this version cannot serve."""
    if str(arguments.get("enable_lora", "")).lower() != "true":
        return
    named = ", ".join(sorted(adapters(folder))) or "none"
    raise ConfigError(
        f"{folder / 'model.json'}: 'enable_lora' is true (multi_lora.json names: {named}), and LoRA adapters "
        "are not supported by this version; leave it out to serve the base model alone"
    )


def _json_object(path: Path, what: str) -> dict[str, Any]:
    try:
        return strict_json.load_object(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {what}") from None
    except OctavoError as error:
        raise ConfigError(f"{path}: {error}") from None


def _switch(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    value = parameters.get(name, "")
    if value.lower() not in (*_YES, *_NO, ""):
        raise ConfigError(f"parameter '{name}' is {value!r}; allowed: {', '.join((*_YES, *_NO))}")
    return value.lower() in _YES if value else default


_COALESCE = {
    "true": "'true' (what waits for a stream while the sender is behind becomes one response)",
    "false": "'false' (every delta is a response of its own)",
}
_LOG = {
    "json": "'json' (a line of JSON when a request is accepted, and one when it has ended)",
    "off": "'off'",
}


def _choice(parameters: Mapping[str, str], name: str, meanings: Mapping[str, str], default: str) -> str:
    """One of the values of `meanings`, which says each of them and what it does."""
    value = parameters.get(name) or default
    if value not in meanings:
        raise ConfigError(f"parameter '{name}' is {value!r}; allowed: {' and '.join(meanings.values())}")
    return value


def _shutdown_timeout_s(parameters: Mapping[str, str], environ: Mapping[str, str]) -> float:
    value = (
        parameters.get("shutdown_timeout_s") or environ.get(SHUTDOWN_TIMEOUT_VARIABLE) or SHUTDOWN_TIMEOUT_S
    )
    try:
        seconds = float(value)
        if 0 <= seconds < 86400:
            return seconds
    except ValueError:
        pass
    raise ConfigError(
        f"parameter 'shutdown_timeout_s' is {value!r}; allowed: 0 to 86400 seconds, and less "
        "than the server's --exit-timeout-secs"
    )


def _gpu_ids(parameters: Mapping[str, str]) -> tuple[int, ...]:
    value = parameters.get("GPU_DEVICE_IDS", "")
    words = [word.strip() for word in value.split(",")] if value else []
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"parameter 'GPU_DEVICE_IDS' is {value!r}; allowed: numbers of GPUs, each once")
    return tuple(map(int, words))
