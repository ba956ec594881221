"""The end of a server with requests in flight: each is answered, and nothing is left behind."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.serving.launcher import _KILL_GRACE_S, RunningServer
from processes import children, group_is_empty, regions
from tiny import tiny_llama
from triton_clients import (
    RUNNING,
    GrpcStream,
    bare_stream,
    generate_stream,
    make_repository,
    own_channel,
    post,
    stream_message,
    wait_for_metric,
)

ENDLESS = json.dumps({"max_tokens": 2000, "ignore_eos": True})
VLLMS_OWN = {"disable_log_requests": True, "gpu_memory_utilization": 0.5, "enforce_eager": True}
PROMPT = "Tell me a long story."
SHUTTING_DOWN = "[UNAVAILABLE] the server is shutting down; send the request to another one"


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
        wait_for_metric(server, 3, RUNNING)
        few = json.dumps({"max_tokens": 8, "ignore_eos": True})
        short.send(text_input="Hello", stream=True, sampling_parameters=few)
        begun = short.next()
        running.next()
        queued.send(stream=True, **body)
        running.next()  # time for it to arrive, if that is enough
        os.killpg(server.process.pid, signal.SIGTERM)
        assert begun.text + ("" if begun.final else short.result())
        unavailable = "[UNAVAILABLE] the server shut down before the request was done"
        assert running.error() == unavailable
        assert queued.error() in (unavailable, SHUTTING_DOWN)
        for thread in threads:
            thread.join(10)
        assert answers["stream"][-1] == {"error": unavailable}
        assert len(answers["stream"]) > 1
        assert answers["whole"] == (400, {"error": unavailable})
    assert server.process.wait(8) == 0
    assert group_is_empty(server.process.pid)
    assert not regions(server)
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


def test_clients_that_stop_reading_do_not_keep_a_server_from_ending(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """More is on its way to each than connections hold, and neither takes it nor goes."""
    tiny_llama(tmp_path / "model")
    repository = make_repository(
        tmp_path / "repository", backend="octavo", model=str(tmp_path / "model"), num_threads=1
    )
    server = start_server(repository, exit_timeout_s=6)
    many = {"max_tokens": 900, "ignore_eos": True, "logprobs": 20, "n": 16}
    body = {
        "text_input": "the",
        "stream": True,
        "return_logprobs": True,
        "sampling_parameters": json.dumps(many),
    }
    channel = own_channel(server.grpc)
    over_grpc = bare_stream(channel, stream_message(**body))  # whose responses nobody asks for
    over_http = socket.create_connection(("127.0.0.1", server.options.http_port))
    over_http.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    content = json.dumps(body).encode()
    head = (
        f"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    over_http.sendall(head.encode() + content)
    assert over_http.recv(1000).startswith(b"HTTP/1.1 200")
    wait_for_metric(server, 32, RUNNING)
    time.sleep(2)  # until nothing more fits
    started_s = time.monotonic()
    server.stop()
    assert time.monotonic() - started_s < 6 + _KILL_GRACE_S + 5
    assert group_is_empty(server.process.pid)
    assert not regions(server)
    over_http.close()
    over_grpc.cancel()
    channel.close()
