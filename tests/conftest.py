"""Fixtures that several packages of tests share."""

import pytest

from tiny import tiny_llama


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model. Leave it as it is."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)
