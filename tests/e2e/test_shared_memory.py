"""Shared memory that is too small: the request that does not fit is told so, and everyone else is served."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.serving.launcher import RunningServer
from processes import zombies
from triton_clients import StartServer, generate, make_repository, post, wait_idle

MIB = 1 << 20
BODY = {"text_input": "the", "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 4})}


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """For this process and those that it starts meanwhile: what a full /dev/shm is to whoever extends a file
    in it, but for the error's last words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def cramped(
    start_server: StartServer, weights: str, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """A server whose shared memory is one region of 1 MiB that cannot grow."""
    folder = tmp_path_factory.mktemp("cramped")
    repository = make_repository(folder, backend="octavo", model=weights, num_threads=1)
    sizes = [f"--backend-config=python,shm-{which}-byte-size={MIB}" for which in ("default", "growth")]
    with no_file_larger_than(MIB * 3 // 2):
        return start_server(repository, extra_arguments=tuple(sizes))


def test_a_request_that_does_not_fit_is_told_so(cramped: RunningServer) -> None:
    expected = generate(cramped, **BODY)
    for _ in range(3):
        status, answer = post(cramped, "generate", {"text_input": "x" * (2 * MIB)})
        assert status >= 400
        assert "shared memory" in answer["error"]
        assert generate(cramped, **BODY) == expected
    wait_idle(cramped)
    assert zombies(cramped.process.pid) == []


def test_an_answer_that_does_not_fit_is_told_so(cramped: RunningServer) -> None:
    """Not silence, and not a stream that never ends."""
    expected = generate(cramped, **BODY)
    many = json.dumps({"max_tokens": 400, "ignore_eos": True, "logprobs": 20, "n": 8})
    status, answer = post(
        cramped, "generate", {"text_input": "the", "sampling_parameters": many, "return_logprobs": True}
    )
    assert status >= 400
    assert answer["error"].startswith("[INTERNAL] the response could not be sent")
    assert "shared memory" in answer["error"]
    assert generate(cramped, **BODY) == expected
    wait_idle(cramped)
