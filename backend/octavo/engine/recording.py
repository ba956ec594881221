"""A run's step plans and their results in a file, so that a step that went wrong can be run again elsewhere.

`Recorder` stands between the engine and its executor where `record_steps` says so, on the engine thread.
`octavo replay` reads what it wrote (`Recording`) and runs it again (`replay`). Torch-free.

A recording is JSON lines. The first says what ran: versions, the model, the engine's complete configuration.
Then come, in turns, a plan and what became of it; a plan is in the file before it runs, so that the last one
of a process that died is there. Prompts and all that was generated are in it, as token ids.
"""

import contextlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.protocol_json import from_json, to_json
from octavo.errors import ConfigError, OctavoError, RecordingError, StepFailed
from octavo.protocol import BlockFile, Executor, SequenceResult, StepPlan, StepResult
from octavo.weights.files import resolve_model_path, sample_digest

log = logging.getLogger("octavo")

_VERSION = 1
_PACKAGES = ("octavo", "torch", "numpy")


class Recorder:
    """Implements `Executor` around another one. A file that is full ends the recording, not the engine.

    What a step does depends on all steps before it, by its rows and by the KV cache. So a recording keeps the
    first `record_steps_bytes` of a run, not the last.
    """

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        """`config` is complete (`for_model`). Raises `ConfigError` when its `record_steps` cannot take a new
        file."""
        assert config.record_steps is not None
        self._executor = executor
        self._room_bytes = config.record_steps_bytes
        try:
            folder = Path(config.record_steps).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            prefix = time.strftime("steps-%Y%m%dT%H%M%S-")
            descriptor, name = tempfile.mkstemp(".jsonl", prefix, folder)  # for nobody else to read
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"'record_steps' is '{config.record_steps}', where no file can be made: {error}; name a "
                "folder that can be written to",
                "record_steps",
            ) from error
        self.path = Path(name)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        log.warning("steps are recorded, prompts' token ids among them, into %s", self.path)
        self._write(
            octavo_recording=_VERSION,
            versions=versions(),
            model_files=model_files(config.model),
            num_blocks=executor.num_blocks,
            num_host_blocks=executor.num_host_blocks,
            config=asdict(config),
        )

    @property
    def num_blocks(self) -> int:
        return self._executor.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._executor.num_host_blocks

    def submit(self, plan: StepPlan) -> None:
        if self._room_bytes <= 0:
            self._end("it has reached 'record_steps_bytes'")
        self._write(plan=plan)
        with self._failures_recorded():
            self._executor.submit(plan)

    def collect(self) -> StepResult:
        with self._failures_recorded():
            result = self._executor.collect()
        self._write(result=result)
        return result

    def close(self, keep: Iterable[BlockFile] = (), discards: Iterable[str] = ()) -> None:
        self._file.close()
        self._executor.close(keep, discards)

    @contextlib.contextmanager
    def _failures_recorded(self) -> Iterator[None]:
        try:
            yield
        except StepFailed as error:
            self._write(failure=str(error))
            raise

    def _write(self, **line: Any) -> None:
        if self._file.closed:
            return
        try:
            self._room_bytes -= self._file.write(to_json(line) + "\n")
            self._file.flush()
        except OSError as error:
            self._end(f"it cannot be written to: {error.strerror}")

    def _end(self, why: str) -> None:
        if not self._file.closed:
            log.warning("the recording %s ends here: %s", self.path, why)
            with contextlib.suppress(OSError):  # what is buffered still cannot be written
                self._file.close()


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Without a result and without a failure, it is one in which the process was interrupted or ended."""

    plan: StepPlan
    result: StepResult | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """What stands in the head of a file, and where the rest is."""

    path: Path
    config: EngineConfig
    num_blocks: int
    num_host_blocks: int
    versions: Mapping[str, str]
    model_files: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> "Recording":
        """Raises `RecordingError`."""
        header = next(_lines(path), None)
        if header is None or "octavo_recording" not in header:
            raise RecordingError(f"{path} is no recording: its first line does not say so")
        if header["octavo_recording"] != _VERSION:
            raise RecordingError(
                f"{path} is a recording of version {header['octavo_recording']!r}; this Octavo reads "
                f"version {_VERSION}"
            )
        try:
            rest = {
                item.name: header[item.name] for item in fields(cls) if item.name not in ("path", "config")
            }
            return cls(path, EngineConfig(**header["config"]), **rest)
        except (KeyError, TypeError, OctavoError) as error:
            raise RecordingError(f"{path}, line 1: this Octavo cannot use it: {error!r}") from error

    def steps(self) -> Iterator[RecordedStep]:
        """One after the other, as they are asked for. Raises `RecordingError`."""
        plan: StepPlan | None = None
        for number, line in enumerate(_lines(self.path), 1):
            if number == 1:
                continue
            try:
                if "plan" in line:
                    if plan is not None:
                        yield RecordedStep(plan)
                    plan = from_json(StepPlan, line["plan"])
                elif plan is not None:
                    result = from_json(StepResult, line["result"]) if "result" in line else None
                    yield RecordedStep(plan, result, line.get("failure"))
                    plan = None
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RecordingError(f"{self.path}, line {number}: it is no step: {error!r}") from error
        if plan is not None:
            yield RecordedStep(plan)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    recorded: RecordedStep
    result: StepResult | None
    failure: StepFailed | None

    @property
    def differences(self) -> list[str]:
        """What is not as it was; nothing, if nobody knows how it was."""
        was, now = self.recorded, self.result
        if was.result is None and was.failure is None:
            return []
        if was.result is None or now is None:
            if was.failure is not None and self.failure is not None:
                return []
            here = "here it does not fail" if self.failure is None else f"here it fails: {self.failure}"
            there = (
                "in the recording it does not" if was.failure is None else f"in the recording: {was.failure}"
            )
            return [f"{here}; {there}"]
        pairs = zip(was.result.sequences, now.sequences, strict=True)
        return [
            f"sequence {then.seq_id} got {_gist(this)} here, {_gist(then)} in the recording"
            for then, this in pairs
            if (then.token_ids, then.error) != (this.token_ids, this.error)
        ]

    @property
    def failures(self) -> list[str]:
        """Of the step, or of sequences in it."""
        if self.failure is not None:
            return [str(self.failure)]
        lost = self.result.sequences if self.result is not None else ()
        return [f"sequence {one.seq_id}: {one.error}" for one in lost if one.error is not None]


def replay(recording: Recording, executor: Executor) -> Iterator[ReplayedStep]:
    """Runs the steps in order, up to the first that is not as it was: beyond it, the rows are not either.

    Raises `RecordingError`.
    """
    for recorded in recording.steps():
        result: StepResult | None = None
        failure: StepFailed | None = None
        try:
            executor.submit(recorded.plan)
            result = executor.collect()
        except StepFailed as error:
            failure = error
        step = ReplayedStep(recorded, result, failure)
        yield step
        if step.differences:
            return


def versions() -> dict[str, str]:
    """What the tokens depend on beside the model and the configuration."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.platform()}
    return here | {name: metadata.version(name) for name in _PACKAGES}


def model_files(model: str) -> dict[str, str]:
    """Of each file of a model, its size and a digest of samples: to tell whether another machine has
    the same, without reading all of it. Raises `ConfigError`."""
    path = resolve_model_path(model)
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    kinds = (".json", ".safetensors", ".gguf")
    return {file.name: _fingerprint(file) for file in found if file == path or file.suffix in kinds}


def _fingerprint(file: Path) -> str:
    return f"{file.stat().st_size} bytes, {sample_digest(file)}"


def _gist(result: SequenceResult) -> str:
    return f"tokens {list(result.token_ids)}" if result.error is None else f"the error '{result.error}'"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A last line that was cut off when its process ended counts as not written."""
    number = 0
    try:
        with path.open("rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    return
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("it is no JSON object")
                number += 1
                yield line
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecordingError(f"{path}, line {number + 1}: {error}") from error
