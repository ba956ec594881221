"""`octavo serve`: starts a tritonserver with Octavo in it, shows how far it is, and stops it on a signal.

Owns the command's options, what it prints, and its exit status: 0 when a running server was stopped by a
signal, 1 when it could not be started or ended by itself, 128 + the signal when it was stopped while loading.
The `octavo` script finds this command by its entry point in the group `octavo.commands`. Importing this
module fails with `ModuleNotFoundError` where the `serve` extra is not installed, and never imports torch.
"""

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.status import Status

from octavo.errors import OctavoError
from octavo.serving import installation
from octavo.serving.launcher import LaunchOptions, RunningServer, check, model_names

installation.require_extra()

_POLL_S = 0.1
_PROMPT = "The three primary colours are"


def serve(
    model_repository: Annotated[
        Path, typer.Option(help="Folder of models, each with a config.pbtxt and version folders.")
    ] = Path("model_repository"),
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for HTTP.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for gRPC.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for Prometheus metrics.")] = 8002,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    offered_as: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="NAME", help="Also serve models whose backend is NAME, such as vllm."),
    ] = None,
    tritonserver: Annotated[
        Path, typer.Option(help="Installed server to use; the nvidia-pytriton package's when it has none.")
    ] = installation.INSTALLED,
    exit_timeout: Annotated[
        int,
        typer.Option(min=0, help="Seconds to stop in; two thirds are for requests in flight."),
    ] = 30,
    log_verbose: Annotated[int, typer.Option(min=0, help="Triton's verbose log level.")] = 0,
    log_file: Annotated[
        Path | None, typer.Option(help="The server's log; a file in Octavo's cache by default.")
    ] = None,
    show_log: Annotated[bool, typer.Option(help="Show the server's log as it is written.")] = False,
    tritonserver_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Options for tritonserver itself.", show_default=False),
    ] = None,
) -> None:
    """Serve the models of a repository in a Triton Inference Server until Ctrl-C."""
    options = LaunchOptions(
        model_repository,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        backend_names=("octavo", *(offered_as or ())),
        log_verbose=log_verbose,
        exit_timeout_s=exit_timeout,
        extra_arguments=tuple(tritonserver_arguments or ()),
    )
    with _Progress() as progress, _Signals() as signals:
        try:
            check(options)
            log_path = log_file or installation.cache_root() / "logs" / f"{host}-{http_port}.log"
            status = _serve(options, tritonserver, log_path, progress, signals, show_log)
        except OctavoError as error:
            progress.end()
            print(f"error: {error}", file=sys.stderr)
            status = 1
    raise typer.Exit(status)


def _serve(
    options: LaunchOptions,
    installed: Path,
    log_path: Path,
    progress: "_Progress",
    signals: "_Signals",
    show_log: bool,
) -> int:
    started = time.monotonic()
    progress.phase("looking for a tritonserver")
    server = installation.find(installed)
    if server.note:
        progress.say(server.note)
    progress.phase(f"starting tritonserver {server.version}")
    progress.say(f"the server's log: {log_path}")
    running = RunningServer.start(options, server, log_path)
    try:
        running.wait_ready(while_waiting=lambda: _watch_start(running, progress, signals, show_log))
        _watch_start(running, progress, signals, show_log)  # what came with the last moment
        progress.end()
        for line in _how_to_use(options, time.monotonic() - started):
            progress.say(line)
        while running.process.poll() is None and not signals.count:
            _watch_run(running, progress, show_log)
            time.sleep(_POLL_S)
        ended_by_itself = not signals.count
        status = _stop(running, progress, signals)
        _watch_run(running, progress, show_log)
    except _Stopped:
        return 128 + signals.last
    finally:
        _stop(running, progress, signals)
    if ended_by_itself:
        raise OctavoError(f"tritonserver ended by itself with status {status}; its log: {log_path}")
    if status != 0:
        raise OctavoError(f"the server was ended before it had answered everything; its log: {log_path}")
    progress.say("stopped")
    return 0


def _stop(running: RunningServer, progress: "_Progress", signals: "_Signals") -> int:
    """A second signal ends the server at once. Does nothing to a server that has ended."""
    if running.process.poll() is None:
        progress.phase("stopping the server")
    status = running.stop(hurry=lambda: signals.count > 1)
    progress.end()
    return status


def _watch_start(running: RunningServer, progress: "_Progress", signals: "_Signals", show_log: bool) -> None:
    for line in running.log.new_lines():
        if show_log:
            progress.say(line.raw)
        elif news := running.log.progress(line):
            (progress.say if line.by_model else progress.phase)(news)
    if signals.count:
        raise _Stopped


def _watch_run(running: RunningServer, progress: "_Progress", show_log: bool) -> None:
    for line in running.log.new_lines():
        if show_log:
            progress.say(line.raw)
        elif line.level in ("W", "E", "F"):
            progress.say(f"{'warning' if line.level == 'W' else 'error'}: {line.text}")
    for what in running.deaths():
        progress.say(f"error: {what}")


def _how_to_use(options: LaunchOptions, seconds: float) -> list[str]:
    host = "localhost" if options.host in ("127.0.0.1", "0.0.0.0") else options.host
    model = model_names(options.repository)[0]
    body = json.dumps({"text_input": _PROMPT, "max_tokens": 32, "temperature": 0})
    return [
        f"ready after {seconds:.1f} s: HTTP on port {options.http_port}, gRPC on {options.grpc_port}, "
        f"metrics on {options.metrics_port}; Ctrl-C stops it. Try:",
        f"curl -s {host}:{options.http_port}/v2/models/{model}/generate -d '{body}'",
    ]


class _Stopped(Exception):
    """A signal came while the server was loading."""


class _Signals:
    """Counts SIGINT, SIGTERM and SIGHUP instead of letting them end this process before the server."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number

    def __enter__(self) -> Self:
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class _Progress:
    """A spinner with the phase on a terminal, a plain line for each phase elsewhere."""

    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def phase(self, text: str) -> None:
        if not self._console.is_terminal:
            self.say(text)
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def say(self, text: str) -> None:
        self._console.print(text)
        self._console.file.flush()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
