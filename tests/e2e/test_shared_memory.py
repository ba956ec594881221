"""Shared memory that is too small: the request that does not fit is told so, and everyone else is served."""

import json
import os
import resource
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.serving import installation
from octavo.serving.launcher import RunningServer
from processes import launch_options, zombies
from triton_clients import generate, make_repository, post, wait_idle

MIB = 1 << 20
MOUNT_SMALL = f'mount -t tmpfs -o size={MIB * 3 // 2} none /dev/shm && exec "$@"'
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


def start_cramped(server: installation.Installation, folder: Path, weights: str) -> RunningServer:
    """On one region of 1 MiB that would grow by as much."""
    repository = make_repository(folder / "repository", backend="octavo", model=weights, num_threads=1)
    sizes = (f"--backend-config=python,shm-{which}-byte-size={MIB}" for which in ("default", "growth"))
    options = launch_options(repository, exit_timeout_s=10, extra_arguments=tuple(sizes))
    return RunningServer.start(options, server, folder / "log")


@pytest.fixture(scope="module")
def limited(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that may not write files of more than one and a half regions."""
    with no_file_larger_than(MIB * 3 // 2):
        server = start_cramped(installation.find(), tmp_path_factory.mktemp("limited"), weights)
    with server:
        server.wait_ready(120)
        yield server


@pytest.fixture(scope="module")
def full(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose /dev/shm, one of its own, has room for one and a half regions."""
    folder = tmp_path_factory.mktemp("full")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["unshare", "--mount", *as_root, "sh", "-c", MOUNT_SMALL]
    tried = subprocess.run([*inside, "sh", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    found = installation.find()
    executable = folder / "tritonserver"
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(inside)} sh {found.executable} "$@"\n')
    executable.chmod(0o755)
    with start_cramped(replace(found, executable=executable), folder, weights) as server:
        server.wait_ready(120)
        yield server


@pytest.fixture(params=["limited", "full"])
def cramped(request: pytest.FixtureRequest) -> RunningServer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, RunningServer)
    return found


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
