"""The end of a server with requests in flight: each is answered, and nothing is left behind."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.serving.launcher import SHARED_MEMORY, RunningServer
from tiny import tiny_llama
from triton_clients import GrpcStream, generate_stream, make_repository, post

ENDLESS = json.dumps({"max_tokens": 2000, "ignore_eos": True})
VLLMS_OWN = {"disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}
PROMPT = "Tell me a long story."


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_everyone_is_answered_when_the_server_is_told_to_end(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """The signal goes to the process group, as a launcher, a supervisor or Ctrl-C sends it. The repository is
    one of Triton's vLLM backend, served as it is."""
    repository = make_repository(
        tmp_path, backend="vllm", parameters={"shutdown_timeout_s": "1.5"}, max_num_seqs=4, **VLLMS_OWN
    )
    server = start_server(repository, backend_names=("vllm",))
    answers: dict[str, Any] = {}

    def ask(name: str, function: Callable[..., Any], *arguments: Any, **inputs: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: function(*arguments, **inputs)}))
        thread.start()
        return thread

    body = {"text_input": PROMPT, "sampling_parameters": ENDLESS}
    with GrpcStream(server) as running, GrpcStream(server) as short, GrpcStream(server) as queued:
        running.send(stream=True, **body)
        running.next()
        threads = [
            ask("stream", generate_stream, server, stream=True, **body),
            ask("whole", post, server, "generate", body),
        ]
        short.send(text_input="Hello", sampling_parameters='{"max_tokens": 8, "ignore_eos": true}')
        running.next()
        queued.send(stream=True, **body)
        running.next()
        os.killpg(server.process.pid, signal.SIGTERM)
        assert short.result().startswith("Hello")
        unavailable = "[UNAVAILABLE] the server shut down before the request was done"
        assert running.error() == f"[StatusCode.UNAVAILABLE] {unavailable}"
        assert queued.error() == f"[StatusCode.UNAVAILABLE] {unavailable}"
        for thread in threads:
            thread.join(10)
        assert answers["stream"][-1] == {"error": unavailable}
        assert len(answers["stream"]) > 1
        assert answers["whole"] == (400, {"error": unavailable})
    assert server.process.wait(8) == 0
    assert not is_alive(server.process.pid)
    assert not list(SHARED_MEMORY.glob(f"{server.options.shm_prefix}*"))
    assert "successfully unloaded 'llm' version 1" in server.log_path.read_text(errors="replace")


def test_a_model_s_process_ends_with_a_server_that_was_killed(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    tiny_llama(tmp_path / "model")
    folder = str(tmp_path / "model")
    repository = make_repository(
        tmp_path / "repository", backend="octavo", model=folder, max_num_seqs=32, num_threads=1
    )
    server = start_server(repository)
    endless = json.dumps({"max_tokens": 1000, "ignore_eos": True, "n": 32})
    with GrpcStream(server) as stream:
        stream.send(text_input="the", stream=True, sampling_parameters=endless)
        stream.next()
        models = children(server.process.pid)
        assert len(models) == 1
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{models[0]}").exists():
            assert time.monotonic() < deadline, "the model's process is still there"
            time.sleep(0.1)


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            pid, _, rest = path.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == parent:
                found.append(int(pid))
    return found
