"""Real tritonservers for the end-to-end tests, each with ports, log and shared memory of its own.

`server` is one server on `model_repository/`, shared by the whole session. `start_server(repository)` starts
more of them, for tests that need another configuration or that end their server; all are stopped at the end.
The tail of each server's log is added to the report of a test that fails.
"""

import socket
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from octavo.serving import installation
from octavo.serving.launcher import RunningServer
from processes import launch_options
from triton_clients import StartServer, make_repository

REPOSITORY = Path(__file__).parents[2] / "model_repository"
START_TIMEOUT_S = 120.0
_LOG_TAIL_LINES = 60
_running = pytest.StashKey[list[RunningServer]]()


@pytest.fixture(scope="session")
def start_server(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[StartServer]:
    """`start_server(repository, wait=True, **LaunchOptions)`: a server that is ready, or still starting."""
    servers: list[RunningServer] = []
    pytestconfig.stash[_running] = servers
    with ExitStack() as stack:

        def start(repository: Path, *, wait: bool = True, **options: Any) -> RunningServer:
            chosen = launch_options(repository, **{"exit_timeout_s": 10, **options})
            log_path = tmp_path_factory.mktemp("tritonserver") / "log"
            server = stack.enter_context(RunningServer.start(chosen, installation.find(), log_path))
            servers.append(server)
            if wait:
                server.wait_ready(START_TIMEOUT_S)
                _wait_for_metrics(server)
            return server

        yield start
        with ThreadPoolExecutor() as pool:  # each takes seconds, most of them waiting
            list(pool.map(RunningServer.stop, servers))


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> RunningServer:
    """The server on the project's own model repository, model loaded. Leave it running."""
    return start_server(REPOSITORY)


@pytest.fixture(scope="session")
def llm(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server whose model is on the backend `octavo`, in float32 and with little room. Leave it idle."""
    repository = make_repository(
        tmp_path_factory.mktemp("repository"),
        backend="octavo",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=32,
    )
    return start_server(repository)


def _wait_for_metrics(server: RunningServer) -> None:
    """The server opens this port last, some 50 ms after it has said that it is ready."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.options.metrics_port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"no metrics at {server.metrics}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.config.stash.get(_running, []):
            if server.log_path.exists():
                lines = server.log_path.read_text(errors="replace").splitlines()
                report.sections.append(
                    (f"log of the server at {server.http}", "\n".join(lines[-_LOG_TAIL_LINES:]))
                )
    return report
