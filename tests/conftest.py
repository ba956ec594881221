"""Fixtures that several packages of tests share."""

from collections.abc import Callable, Iterator

import pytest

from scripted_http import Script, Server
from tiny import tiny_llama


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model. Leave it as it is."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


@pytest.fixture
def serve() -> Iterator[Callable[[Script], Server]]:
    """`serve(script)` starts a server that does what the script does; all are closed at the end."""
    servers: list[Server] = []

    def start(script: Script) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
