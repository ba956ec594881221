"""A server on ports that nobody uses, and a gateway before one, for as long as something is measured on them.

Used by `load_run`, `gateway_overhead` and the peers, and for the gateway by the end-to-end tests.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from octavo.serving import installation
from octavo.serving.launcher import LaunchOptions, RunningServer

REPOSITORY = Path(__file__).parents[1] / "model_repository"
LONGEST_START_S = 120.0
_GATEWAY_START_S = 30.0
_GATEWAY_STOP_S = 15.0  # longer than it waits for what is in flight


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def serving(repository: Path, log: Path, timeout_s: float = LONGEST_START_S) -> Iterator[RunningServer]:
    """A server whose models are ready. Raises `LaunchError`."""
    http_port, grpc_port, metrics_port = free_ports(3)
    options = LaunchOptions(repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    with RunningServer.start(options, installation.find(), log) as server:
        server.wait_ready(timeout_s)
        yield server


@contextmanager
def gateway_before(
    server: RunningServer, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The port of a gateway in a process of its own. `environment` is added to this process's.

    Raises `RuntimeError` with the end of its log where it does not start.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "octavo_client", "gateway", f"grpc://{server.grpc}", "--port", str(port)]
    command += ["--metrics-url", f"http://{server.metrics}/metrics"]
    with log.open("wb") as out:
        gateway = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(environment or {})})
    try:
        deadline_s = time.monotonic() + _GATEWAY_START_S
        while not _listens(port):
            if gateway.poll() is not None or time.monotonic() > deadline_s:
                said = log.read_text(errors="replace").strip()[-500:]
                raise RuntimeError(f"the gateway did not start; its log: {log}\n{said}")
            time.sleep(0.05)
        yield port
    finally:
        gateway.terminate()
        try:
            gateway.wait(_GATEWAY_STOP_S)
        finally:
            gateway.kill()
            gateway.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
