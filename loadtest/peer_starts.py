"""How long `octavo serve` takes until it answers.

`warm` starts find the kernels that an earlier one compiled; `cold` ones find an empty cache, for which the
server's backends have to be laid out as well. Files are in the system's page cache in both cases.
"""

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peer_process import PeerFailed, environment
from servers import REPOSITORY, free_ports

LONGEST_START_S = 300.0
_POLL_S = 0.02


def octavo_starts_s(count: int, log_path: Path) -> dict[str, list[float]]:
    """Seconds from the start of `octavo serve` to its readiness, `count` times warm and as often cold.

    Raises `PeerFailed`.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    _start_s(log_path)  # makes the caches warm
    taken_s: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(count):
        taken_s["warm"].append(_start_s(log_path))
        with tempfile.TemporaryDirectory() as empty:
            taken_s["cold"].append(_start_s(log_path, Path(empty)))
    return taken_s


def _start_s(log_path: Path, cache: Path | None = None) -> float:
    http_port, grpc_port, metrics_port = free_ports(3)
    command = [
        *(str(Path(sys.executable).parent / "octavo"), "serve", "--model-repository", str(REPOSITORY)),
        *("--http-port", str(http_port), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
        *("--log-file", str(log_path.with_suffix(".server.log"))),
    ]
    start_s = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment({"OCTAVO_CACHE": str(cache)} if cache else {}),
            start_new_session=True,
        )
    try:
        while not _is_ready(http_port):
            if process.poll() is not None:
                raise PeerFailed(f"octavo serve ended: {log_path.read_text(errors='replace').strip()[-500:]}")
            if time.perf_counter() - start_s > LONGEST_START_S:
                raise PeerFailed(f"octavo serve was not ready after {LONGEST_START_S:.0f} s")
            time.sleep(_POLL_S)
        return time.perf_counter() - start_s
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        process.wait(60)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
