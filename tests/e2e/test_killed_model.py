"""A model's process that is killed, as the kernel does when memory runs out: what the server makes of it."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from octavo.serving.launcher import RunningServer
from tiny import tiny_llama
from triton_clients import make_repository, post, wait_for_metric

BODY = {"text_input": "the", "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 4})}


def processes(server: RunningServer) -> dict[str, int]:
    """Those of its models, by the name of the instance."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if parent == server.process.pid:
            name = next((word for word in words if word.endswith(b"_0_0")), b"")
            found[name.decode()] = int(path.name)
    return found


def test_a_killed_model_says_so_and_comes_back_when_it_is_loaded_anew(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """With nothing in flight. The other model is not touched; a load without an unload changes nothing."""
    tiny_llama(tmp_path / "model")
    engine = {"model": str(tmp_path / "model"), "max_model_len": 128, "num_threads": 1}
    repository = make_repository(tmp_path / "repository", backend="octavo", **engine)
    other = make_repository(tmp_path / "other", backend="octavo", **engine) / "llm"
    other.rename(repository / "other")
    server = start_server(repository)
    expected = post(server, "generate", BODY)
    assert expected[0] == 200
    models = processes(server)
    assert sorted(models) == ["llm_0_0", "other_0_0"]
    os.kill(models["llm_0_0"], signal.SIGKILL)
    time.sleep(0.2)
    assert post(server, "generate", BODY) == (400, {"error": "Stub process 'llm_0_0' is not healthy."})
    answer = httpx.post(f"http://{server.http}/v2/models/other/generate", json=BODY, timeout=30)
    assert answer.json()["text_output"] == expected[1]["text_output"]
    # The server goes on to call the model ready, and does not start another process by itself.
    assert httpx.get(f"http://{server.http}/v2/models/llm/ready").status_code == 200
    control = f"http://{server.http}/v2/repository/models/llm"
    assert httpx.post(f"{control}/load", json={}, timeout=60).status_code == 200
    assert post(server, "generate", BODY)[0] == 400
    assert httpx.post(f"{control}/unload", json={}, timeout=60).status_code == 200
    deadline = time.monotonic() + 20
    while httpx.get(f"http://{server.http}/v2/models/llm/ready").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert httpx.post(f"{control}/load", json={}, timeout=60).status_code == 200
    assert post(server, "generate", BODY) == expected
    wait_for_metric(server, 1, "octavo:ready", model="llm")
