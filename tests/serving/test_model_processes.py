"""The watch over a server's models, with this process for a server and a shell for each of its models."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from octavo.serving.model_processes import DeadProcess, DeathWatch, model_processes

HTTP = "127.0.0.1:8000"


class Models:
    """`start(instance)` makes a child whose command line is a stub's; it ends when `end` says so."""

    def __init__(self) -> None:
        self.server = os.getpid()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, instance: str) -> "subprocess.Popen[bytes]":
        words = ["/server/triton_python_backend_stub", "-c", "read line", instance, "DEFAULT"]
        process = subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE)
        self.processes.append(process)
        deadline = time.monotonic() + 10
        while instance not in model_processes(self.server).values():  # between fork and exec
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    def end(self, process: "subprocess.Popen[bytes]", number: signal.Signals | None) -> None:
        """Without waiting for it."""
        assert process.stdin is not None
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        deadline = time.monotonic() + 10
        while process.pid in model_processes(self.server):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def models() -> Iterator[Models]:
    models = Models()
    yield models
    for process in models.processes:
        process.kill()
        process.communicate()


def test_a_servers_models_are_known_by_their_instances(models: Models) -> None:
    one, two = models.start("llm_0_0"), models.start("other_0_1")
    found = model_processes(models.server)
    assert (found[one.pid], found[two.pid]) == ("llm_0_0", "other_0_1")


def test_a_model_that_was_killed_is_told_of_once(models: Models) -> None:
    watch = DeathWatch(models.server, dead_s=0, look_s=0)
    one, two = models.start("llm_0_0"), models.start("other_0_1")
    assert watch.deaths() == []
    models.end(one, signal.SIGKILL)
    assert watch.deaths() == [DeadProcess(one.pid, "llm_0_0", signal.SIGKILL)]
    assert watch.deaths() == []
    models.end(two, None)
    assert watch.deaths() == [DeadProcess(two.pid, "other_0_1", None)]


def test_one_that_the_server_waits_for_soon_is_not_told_of(models: Models) -> None:
    """As when a model is unloaded."""
    watch = DeathWatch(models.server, dead_s=0.5, look_s=0)
    process = models.start("llm_0_0")
    watch.deaths()
    models.end(process, None)
    assert watch.deaths() == []
    process.wait()
    time.sleep(0.6)
    assert watch.deaths() == []


def test_a_watch_that_is_asked_often_looks_seldom(models: Models) -> None:
    watch = DeathWatch(models.server, dead_s=0, look_s=3600)
    watch.deaths()
    models.end(models.start("llm_0_0"), signal.SIGKILL)
    assert watch.deaths() == []


def test_the_operator_is_told_which_why_and_what_heals_it() -> None:
    said = DeadProcess(7, "my_llm_0_3", signal.SIGKILL).explain(HTTP)
    assert said.startswith(
        "the process of model 'my_llm' (instance my_llm_0_3, process 7) was killed by SIGKILL, which is what "
        "the kernel does when memory runs out"
    )
    for verb in ("unload", "load"):
        assert f"curl -X POST http://{HTTP}/v2/repository/models/my_llm/{verb}" in said
    assert "lower kv_cache_memory_bytes" in said
    crashed = DeadProcess(7, "llm_0_0", signal.SIGSEGV).explain(HTTP)
    assert "was killed by SIGSEGV. The server goes on" in crashed
    unnamed = DeadProcess(7, "fast_0", None).explain(HTTP)
    assert unnamed.startswith("the process of a model (instance fast_0, process 7) ended by itself. ")
    assert "/v2/repository/models/MODEL/load" in unnamed
