"""Reads a model repository as Triton and Octavo would, and says what becomes of it. Starts nothing.

Used by `check`, which prints it. What is said of a model comes from the code that would load it: `config`,
`model_settings`, `placement`, `worker.capacity`. Torch is imported only to open a checkpoint.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelInstanceGroup
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonConfig

from octavo.config import EngineConfig, SortedArguments, sort_arguments
from octavo.errors import ConfigError, LaunchError, OctavoError
from octavo.serving import codec, model_settings, tracing
from octavo.serving.launcher import model_names
from octavo.serving.placement import Placement, place

BACKENDS = ("octavo", "vllm")  # names under which the launcher offers Octavo
_RE_EXPORT = re.compile(r"^\s*(from|import)\s+octavo\b", re.M)


@dataclass(slots=True)
class VersionReport:
    """One version of a model of ours, by what becomes of all that its folder says."""

    version: int
    honoured: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    adapters_refused: dict[str, str] = field(default_factory=dict)
    capacity: dict[str, Any] | None = None  # the fields of `worker.capacity.Capacity`, and what follows
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ModelReport:
    """`ours` is false for what the server's other backends serve; of those nothing more is said."""

    name: str
    backend: str = ""
    ours: bool = False
    instances: list[str] = field(default_factory=list)
    parameters_honoured: dict[str, str] = field(default_factory=dict)
    parameters_ignored: dict[str, str] = field(default_factory=dict)
    versions: list[VersionReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def all_errors(self) -> list[str]:
        return self.errors + [
            f"version {report.version}: {error}" for report in self.versions for error in report.errors
        ]


def read_repository(repository: Path) -> list[ModelReport]:
    """Every model of it, sorted by name. Raises `LaunchError` when there is none."""
    names = model_names(repository)
    if (repository / "config.pbtxt").exists():
        raise LaunchError(
            f"{repository} is a model; name the folder that it is in, {repository.absolute().parent}"
        )
    if not names:
        raise LaunchError(f"{repository} holds no model: a model is a folder with a config.pbtxt")
    return [_read_model(repository / name, names) for name in names]


def _read_model(folder: Path, names: list[str]) -> ModelReport:
    report = ModelReport(folder.name)
    path = folder / "config.pbtxt"
    config = TritonConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except (OSError, UnicodeDecodeError) as error:
        report.errors.append(f"config.pbtxt cannot be read: {error}; it names the backend")
        return report
    except text_format.ParseError as error:
        report.errors.append(f"config.pbtxt: line {error}")
        return report
    report.backend = config.backend or config.platform
    report.instances = [_instances(group) for group in config.instance_group]
    if config.name not in ("", folder.name):
        report.errors.append(
            f"config.pbtxt: the name is '{config.name}', but the folder's is '{folder.name}'"
        )
    if config.platform == "ensemble":
        missing = sorted({step.model_name for step in config.ensemble_scheduling.step} - set(names))
        report.errors += [
            f"config.pbtxt: a step is the model '{name}', which is not here" for name in missing
        ]
    versions = _versions(folder, config)
    report.ours = config.backend in BACKENDS or (
        config.backend == "python" and any(_re_exports(folder / str(version)) for version in versions)
    )
    if not report.ours:
        return report
    if config.backend == "vllm":
        report.notes.append("served with: octavo serve --as vllm")
    if not versions:
        report.errors.append("no version folder to serve, such as 1/, with a model.json in it")
    placed = partial(_place, config, _read_config(config, report))
    report.versions = [_read_version(folder / str(version), placed) for version in versions]
    return report


def _read_config(config: TritonConfig, report: ModelReport) -> tuple[int, ...]:
    """What `auto_complete_config` and `Settings.read` would say of it. Returns GPU_DEVICE_IDS."""
    if config.max_batch_size:
        report.errors.append(
            f"config.pbtxt: max_batch_size is {config.max_batch_size}; allowed: 0, since the engine makes "
            "its own batches"
        )
    for declared, table in ((config.input, codec.INPUTS), (config.output, codec.OUTPUTS)):
        known = {spec.name: spec for spec in table}
        for tensor in declared:
            spec = known.get(tensor.name)
            if spec is None:
                report.notes.append(f"the tensor '{tensor.name}' is none of Octavo's")
                continue
            types = (spec.data_type, "INT64") if spec.name == "input_ids" else (spec.data_type,)
            type = DataType.Name(tensor.data_type).removeprefix("TYPE_")
            if type not in types or list(tensor.dims) != [spec.length]:
                report.errors.append(
                    f"config.pbtxt: '{tensor.name}' is {type} {list(tensor.dims)}; allowed: "
                    f"{' or '.join(types)} [{spec.length}]"
                )
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    for name, value in sorted(parameters.items()):
        if name in model_settings.PARAMETERS:
            report.parameters_honoured[name] = value
        elif name in model_settings.PYTHON_BACKEND_PARAMETERS:
            report.parameters_ignored[name] = "the server's Python backend reads it itself"
        else:
            report.parameters_ignored[name] = "nothing here reads it"
    try:
        return model_settings.Settings.read(parameters).gpu_ids
    except ConfigError as error:
        report.errors.append(f"config.pbtxt: {error}")
        return ()


def _place(config: TritonConfig, gpu_ids: tuple[int, ...], arguments: Mapping[str, Any]) -> Placement:
    """In the first instance group; where there is none, the server decides by the machine."""
    if not config.instance_group:
        return Placement()
    group = config.instance_group[0]
    # Which GPU makes no difference here, so no mask is looked at.
    return place(_kind(group), group.gpus[0] if group.gpus else 0, gpu_ids, arguments, {})


def _kind(group: ModelInstanceGroup) -> str:
    return str(ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_"))


def _instances(group: ModelInstanceGroup) -> str:
    gpus = f" on GPU {', '.join(map(str, group.gpus))}" if group.gpus else ""
    return f"{group.count or 1} x KIND_{_kind(group)}{gpus}"


def _read_version(folder: Path, placed: Callable[[Mapping[str, Any]], Placement]) -> VersionReport:
    report = VersionReport(int(folder.name))
    try:
        arguments = model_settings.engine_arguments(folder / "model.json")
        adapters = model_settings.adapters(folder)
    except ConfigError as error:
        report.errors.append(str(error))
        return report
    report.adapters_refused = adapters
    parts = sort_arguments(arguments)
    report.honoured, report.ignored, report.refused = parts.honoured, parts.ignored, parts.refused
    report.errors += parts.refused.values()
    try:
        device = placed(arguments).device
        config = _resolve(parts, report)
        if config is not None:
            _open(dataclasses.replace(config, device=device or config.device), report)
    except OctavoError as error:
        report.errors.append(str(error))
    return report


def _resolve(parts: SortedArguments, report: VersionReport) -> EngineConfig | None:
    """The configuration of what is honoured; None when a value is refused, which then moves from the honoured
    arguments, the report's too, to the refused ones."""
    honoured, sound = parts.honoured, True
    while True:
        try:
            config = parts.config()
            return config if sound else None
        except ConfigError as error:
            if error.key is None or error.key not in honoured or error.key == "model":
                raise
            report.refused[error.key] = str(error)
            report.errors.append(str(error))
            del honoured[error.key]
            sound = False


def _open(config: EngineConfig, report: VersionReport) -> None:
    # Imported late: torch takes a second, and a repository that is wrong does not need it.
    from octavo.engine.tokenizer import Tokenizer
    from octavo.worker.capacity import estimate

    if config.otlp_traces_endpoint is not None:
        tracing.require_packages()
    capacity = estimate(config)
    report.capacity = {
        **dataclasses.asdict(capacity),
        "num_tokens": capacity.num_tokens,
        "max_concurrency": round(capacity.max_concurrency, 2),
    }
    Tokenizer.load(config.model, config.tokenizer)


def _versions(folder: Path, config: TritonConfig) -> list[int]:
    """Those that Triton would serve, by the version policy: the newest one by default."""
    there = sorted(_numbered(folder))
    policy = config.version_policy
    if policy.HasField("all"):
        return there
    if policy.HasField("specific"):
        return [version for version in there if version in policy.specific.versions]
    return there[-(policy.latest.num_versions or 1) :]


def _numbered(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        if path.is_dir() and path.name.isdecimal() and path.name[0] != "0":
            yield int(path.name)


def _re_exports(folder: Path) -> bool:
    try:
        return _RE_EXPORT.search((folder / "model.py").read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False
