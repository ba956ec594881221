"""Starts a tritonserver on a model repository, waits until it answers, and stops it without a trace.

Owns the command line, the checks that can be made before starting, the process group, and the shared
memory that a killed server leaves behind. `installation` says which server that is. Used by `cli`, which
shows progress, and by the end-to-end tests.
"""

import errno
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from octavo.errors import LaunchError
from octavo.serving import installation, preflight
from octavo.serving.model_processes import DeathWatch
from octavo.serving.model_settings import SHUTDOWN_TIMEOUT_VARIABLE
from octavo.serving.server_log import ServerLog
from octavo_kernels.cpu import build

SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.05
_MODEL_SHARE = 2 / 3  # of the exit timeout is a model's for its requests; the rest is for unloading
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy is in between
_STUB_TIMEOUT_S = 1800  # a model of many GiB takes its time to load
SHM_BYTES = 16 << 20  # at first, and to grow by: the server's 1 MiB is outgrown by the first few requests
_REGION_OPTION = re.compile(r"--backend-config=python,shm-default-byte-size=(\d+)")
_KILL_GRACE_S = 5.0  # beyond the server's own deadline, before its group is killed
_HANGS_S = 60.0  # of silence, once all models are loaded
_LOADING_GRACE_S = 2.0  # a server that still loads has nothing in flight, and does not listen

# Becomes the server, which then ends with us however we end. In a program of its own since code that runs
# between fork and exec (`preexec_fn`) can deadlock in a process that has threads. 1 is PR_SET_PDEATHSIG.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to serve. `backend_names` are the names under which Octavo is offered as a backend."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    backend_names: tuple[str, ...] = ("octavo",)
    log_verbose: int = 0
    exit_timeout_s: int = 30
    extra_arguments: tuple[str, ...] = ()
    shm_prefix: str = field(default_factory=lambda: f"octavo-{os.getpid()}-{secrets.token_hex(4)}-")


def check(options: LaunchOptions) -> None:
    """All that can be told before a process is started. Raises `LaunchError` with one line to act on."""
    problem = preflight.python_problem() or _compiler_problem()
    if problem:
        raise LaunchError(problem)
    models = model_names(options.repository)
    if not models:
        raise LaunchError(
            f"the model repository {options.repository} holds no model: a model is a folder with a "
            "config.pbtxt and a numbered version folder, such as llm/1/"
        )
    for name in options.backend_names:
        if name == "python" or not name.isidentifier():
            raise LaunchError(f"Octavo cannot be offered as the backend '{name}'; try --as vllm")
    problem = preflight.shared_memory_problem(len(models), _region_bytes(options), SHARED_MEMORY)
    if problem:
        raise LaunchError(problem)
    _check_ports(options)


def model_names(repository: Path) -> list[str]:
    """The models of a repository, sorted. Raises `LaunchError` when it is not a folder."""
    if not repository.is_dir():
        raise LaunchError(
            f"the model repository {repository} is not a folder; name one with --model-repository "
            "(make serve MODEL_REPOSITORY=...)"
        )
    return sorted(path.name for path in repository.iterdir() if path.is_dir() and path.name[0] != ".")


def command(options: LaunchOptions, server: installation.Installation, backends: Path) -> list[str]:
    """The server's command line. What the user added comes last, so that it wins."""
    python_backend = {
        "shm-region-prefix-name": options.shm_prefix,
        "shm-default-byte-size": SHM_BYTES,
        "shm-growth-byte-size": SHM_BYTES,
        "stub-timeout-seconds": _STUB_TIMEOUT_S,
    }
    arguments = [
        str(server.executable),
        f"--model-repository={options.repository.resolve()}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",  # unload and reload of a model need it
        "--load-model=*",
        *(f"--{service}-address={options.host}" for service in ("http", "grpc", "metrics")),
        f"--http-port={options.http_port}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--log-verbose={options.log_verbose}",
        *(f"--backend-config=python,{key}={value}" for key, value in python_backend.items()),
    ]
    if server.cache_folder is not None:
        arguments.append(f"--cache-directory={server.cache_folder}")
    if server.repoagent_folder is not None:
        arguments.append(f"--repoagent-directory={server.repoagent_folder}")
    return arguments + list(options.extra_arguments)


class RunningServer:
    """A tritonserver in a process group of its own. Leave it, as a context manager, and nothing is left."""

    def __init__(self, options: LaunchOptions, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self.options = options
        self.process = process
        self.log_path = log_path
        self.log = ServerLog(log_path)
        self._death_watch = DeathWatch(process.pid)
        host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
        self.http = f"{host}:{options.http_port}"
        self.grpc = f"{host}:{options.grpc_port}"
        self.metrics = f"{host}:{options.metrics_port}"
        self._was_ready = False

    @classmethod
    def start(cls, options: LaunchOptions, server: installation.Installation, log_path: Path) -> Self:
        """Returns as soon as the process runs; its output goes to `log_path`. Raises `LaunchError`.

        The server is told to end when the calling thread does: call it from one that stays.
        """
        check(options)
        backends = installation.assemble_backends(server, options.backend_names)
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = log_path.open("wb")
        except OSError as error:
            raise LaunchError(
                f"the log {log_path} cannot be written: {error.strerror}; pass another with --log-file"
            ) from error
        try:
            with log:
                process = subprocess.Popen(
                    [sys.executable, "-ISc", _DIE_WITH_PARENT, *command(options, server, backends)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **installation.environment(server),
                        SHUTDOWN_TIMEOUT_VARIABLE: str(options.exit_timeout_s * _MODEL_SHARE),
                    },
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"{server.executable} cannot be started: {error}") from error
        return cls(options, process, log_path)

    def is_ready(self) -> bool:
        """Whether the server and every model it was told to load take requests."""
        try:
            with _DIRECT.open(f"http://{self.http}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_ready(
        self, timeout_s: float | None = None, while_waiting: Callable[[], None] | None = None
    ) -> None:
        """Blocks, and calls `while_waiting` about twenty times a second; what that raises ends the wait.

        Raises `LaunchError` with the reason from the server's log when it ends, hangs, or is too slow.
        """
        started = time.monotonic()
        while not self.is_ready():
            if self.process.poll() is not None:
                raise LaunchError(self.failure())
            if self._death_watch.deaths():  # which the server may not notice for half an hour
                raise LaunchError(
                    self.log.failure() or f"a model's process died while loading{self._see_log()}"
                )
            if self.log.silent_s() > _HANGS_S and self.log.models_wait_for_server():
                raise LaunchError(
                    f"the server hangs: its models say that they are ready, and for {_HANGS_S:.0f} s it has "
                    f"not taken them; this was seen on overloaded machines: start it again{self._see_log()}"
                )
            if timeout_s is not None and time.monotonic() - started > timeout_s:
                raise LaunchError(f"the server was not ready after {timeout_s:.0f} s{self._see_log()}")
            if while_waiting is not None:
                while_waiting()
            time.sleep(_POLL_S)
        self._was_ready = True
        self._death_watch.look()  # so that a process that dies at once is told of by name

    def deaths(self) -> list[str]:
        """What to tell the operator of each model's process that died since the last call."""
        return [death.explain(self.http) for death in self._death_watch.deaths()]

    def failure(self) -> str:
        """Why a server that ended did so, in one line."""
        return self.log.failure() or f"tritonserver ended with status {self.process.poll()}{self._see_log()}"

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> int:
        """Asks the server to finish what is in flight; kills it after its deadline, or when `hurry` says so.

        Returns its exit status, negative for a signal. May be called again. Afterwards no process of its
        group and no shared memory of its prefix is left.
        """
        if self.process.poll() is None:
            # To the group: Triton tells a model of the shutdown only after the model's last response.
            os.killpg(self.process.pid, signal.SIGTERM)
            grace_s = self.options.exit_timeout_s + _KILL_GRACE_S if self._was_ready else _LOADING_GRACE_S
            deadline = time.monotonic() + grace_s
            while self.process.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(_POLL_S)
            if self.process.poll() is None:
                self.process.kill()
        status = self.process.wait()
        _kill_group(self.process.pid)
        for region in SHARED_MEMORY.glob(f"{self.options.shm_prefix}*"):
            region.unlink(missing_ok=True)
        return status

    def _see_log(self) -> str:
        return f"; its log: {self.log_path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _kill_group(group: int) -> None:
    """Ends what the server left in its group: a stub that hangs in user code does not follow its parent."""
    deadline = time.monotonic() + _KILL_GRACE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_POLL_S)


def _region_bytes(options: LaunchOptions) -> int:
    """What each model instance takes of shared memory to start with; the last option given holds."""
    sizes = [_REGION_OPTION.fullmatch(argument) for argument in options.extra_arguments]
    return next((int(match[1]) for match in reversed(sizes) if match), SHM_BYTES)


def _compiler_problem() -> str | None:
    """A machine with the kernels of `octavo build-kernels` in its cache needs no compiler."""
    problem = preflight.compiler_problem()
    try:
        return problem if problem and not build.compiled_ahead() else None
    except build.BuildError as error:
        raise LaunchError(str(error)) from error


def _check_ports(options: LaunchOptions) -> None:
    if not options.host or ":" in options.host:
        raise LaunchError(f"'{options.host}' is no address to listen on; give a name or an IPv4 address")
    seen: dict[int, str] = {}
    for service in ("http", "grpc", "metrics"):
        option = f"--{service}-port"
        port: int = getattr(options, f"{service}_port")
        if port in seen:
            raise LaunchError(f"{seen[port]} and {option} are both {port}; each needs a port of its own")
        seen[port] = option
        try:
            _bind(options.host, port)
        except socket.gaierror as error:
            raise LaunchError(f"'{options.host}' is no address to listen on: {error.strerror}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise LaunchError(f"'{options.host}' is not an address of this machine") from error
            raise LaunchError(
                f"port {port} cannot be used: {error.strerror}; pass another with {option} "
                f"(make serve {service.upper()}_PORT=...)"
            ) from error


def _bind(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that is winding down is free
        probe.bind((host, port))
