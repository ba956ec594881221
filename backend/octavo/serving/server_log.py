"""Reads a tritonserver's log: what it is doing now, and why it gave up.

Owns what is known of the log's format. Used by `launcher` for the reason of a failed start and by `cli` for
progress. A line of Triton's own looks like `I1130 08:38:19.808705 6051 model.py:6] "text"` with newlines and
quotes in the text escaped; whatever a model prints stands between them as it is.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+\s+\d+ (?P<source>[\w.-]+):\d+\]\s+(?P<text>.*)")
_LOADING = re.compile(r"loading: (?P<model>[^:]+):\d+")
_LOADED = re.compile(r"successfully loaded '(?P<model>[^']+)'")
_INSTANCE_BEGINS = re.compile(r"TRITONBACKEND_ModelInstanceInitialize: (\S+) \(")
_INSTANCE_IS_READY = re.compile(r"(\S+): version \d+ is ready")  # in our words
_LISTENS = re.compile(r"Started (\w+) at ")
_NOT_LOADED = re.compile(
    r"failed to load '(?P<model>[^']+)' version \d+: (?:[A-Z][a-z ]+: )?(?P<why>.*)", re.S
)
_BAD_CONFIG = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<why>.*)", re.S)
_STUB_NOT_STARTED = re.compile(r"Failed to preinitialize Python stub: (?P<why>.*)", re.S)
_PROTOBUF = re.compile(r"\[libprotobuf ERROR .*?\] (?P<why>.*)")
_NOT_STARTED = re.compile(
    r"tritonserver: (unrecognized option .*)|(failed to start \w+ service: .*)|^error: (.*)|"
    r"(error while loading shared libraries: .*)"
)
# A traceback follows the message; an exception of ours says all without its name.
_TRACEBACK = re.compile(r"\n+At:\n.*", re.S)
_OWN_NAME = re.compile(r"^(?:TritonModelException|ConfigError|WeightsError|LaunchError|OctavoError): ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `level` and `source` (a file name) are None for what a model printed by itself."""

    raw: str
    level: str | None
    source: str | None
    text: str

    @property
    def by_model(self) -> bool:
        """Whether a model wrote it, through Triton's logger."""
        return self.level == "I" and self.source is not None and self.source.endswith(".py")


def parse(line: str) -> LogLine:
    match = _LINE.match(line)
    if match is None:
        return LogLine(line, None, None, line)
    text = match["text"].strip()
    if text.startswith('"'):
        text = text.strip('"').replace(r"\n", "\n").replace(r"\"", '"')
    return LogLine(line, match["level"], match["source"], text)


class ServerLog:
    """The log of one server. `new_lines` continues where it stopped; `failure` always reads the whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_bytes = 0
        self._loading: list[str] = []

    def new_lines(self) -> Iterator[LogLine]:
        """What was written since the last call; a line that is not complete yet waits for the next one."""
        with self.path.open("rb") as file:
            file.seek(self._offset_bytes)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset_bytes += len(raw)
                yield parse(raw.decode(errors="replace").rstrip("\n"))

    def progress(self, line: LogLine) -> str | None:
        """What to tell somebody who waits for the models to load; None when the line is of no interest."""
        if match := _LOADING.match(line.text):
            self._loading.append(match["model"])
            return f"loading the model '{match['model']}'"
        if match := _LOADED.match(line.text):
            self._loading = [model for model in self._loading if model != match["model"]]
            return f"the model '{match['model']}' is loaded"
        return line.text if line.by_model and self._loading else None

    def silent_s(self) -> float:
        """For how long nothing has been written."""
        return time.time() - self.path.stat().st_mtime

    def models_wait_for_server(self) -> bool:
        """Whether all that is loading has said that it is ready, and the server does not listen yet. It may
        be so for a moment; for longer it is a server that hangs. Only models of ours say so."""
        texts = [line.text for line in self._all_lines()]
        begun, ready, listens = (
            sorted(match[1] for text in texts if (match := pattern.match(text)))
            for pattern in (_INSTANCE_BEGINS, _INSTANCE_IS_READY, _LISTENS)
        )
        return bool(begun) and begun == ready and not listens

    def failure(self) -> str | None:
        """Why the server could not start, in one line; None when the log does not say."""
        lines = self._all_lines()
        return _first_model_failure(lines) or _first_server_failure(lines)

    def _all_lines(self) -> list[LogLine]:
        return [parse(line) for line in self.path.read_text(errors="replace").splitlines()]


def _first_model_failure(lines: list[LogLine]) -> str | None:
    syntax = None
    for line in lines:
        if match := _PROTOBUF.match(line.text):
            syntax = match["why"]
        elif match := _BAD_CONFIG.match(line.text):
            why = f"{match['why']}: {syntax}" if syntax else match["why"]
            return f"the model '{match['model']}' cannot be loaded: {why}"
        elif match := _NOT_LOADED.match(line.text):
            why = _OWN_NAME.sub("", _TRACEBACK.sub("", match["why"]))
            why = why.removeprefix(f"{match['model']} cannot be loaded: ")
            return f"the model '{match['model']}' cannot be loaded: {' '.join(why.split())}"
        elif match := _STUB_NOT_STARTED.match(line.text):
            return f"a model cannot be loaded: {' '.join(match['why'].split())}"
    return None


def _first_server_failure(lines: list[LogLine]) -> str | None:
    for line in lines:
        if match := _NOT_STARTED.search(line.text):
            said = next(group for group in match.groups() if group)
            return f"tritonserver cannot start: {said.strip()}"
    return None
