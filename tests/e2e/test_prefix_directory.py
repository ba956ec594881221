"""A prefix cache's directory under real servers: whatever ended before, its prompts are warm again."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo.serving.launcher import RunningServer
from octavo.serving.model_processes import model_processes
from tiny import tiny_llama
from triton_clients import StartServer, control, generate, make_repository, settled
from waiting import wait_until

SYSTEM = "You are an assistant who answers what he is asked, in few words and with care. "
OTHER = "You are a translator. Put what you are given into French, and say nothing of your own. "


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path, cache: Path) -> Path:
    tiny_llama(tmp_path / "model")
    return make_repository(
        tmp_path / "repository",
        backend="octavo",
        model=str(tmp_path / "model"),
        dtype="float32",
        max_model_len=512,
        num_threads=1,
        prefix_cache_dir=str(cache),
        prefix_cache_disk_gib=0.125,
    )


def ask(server: RunningServer, prompt: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    answer: dict[str, Any] = generate(
        server, text_input=prompt, temperature=0, max_tokens=8, return_request_stats=True
    )
    return answer["text_output"], json.loads(answer["request_stats"])["cached_prompt_tokens"]


def test_prompts_are_warm_when_a_model_is_loaded_anew_and_when_a_server_was_killed(
    start_server: StartServer, repository: Path, cache: Path
) -> None:
    server = start_server(repository)
    answer, found = ask(server, SYSTEM + "Who?")
    assert found == 0
    assert not list(cache.rglob("*.kv"))
    (process,) = model_processes(server.process.pid)
    assert control(server, "llm", "unload")[0] == 200
    wait_until(lambda: process not in model_processes(server.process.pid), "it is still there", 60)
    num_files = len(list(cache.rglob("*.kv")))
    assert num_files >= len(SYSTEM) // 16 - 1  # a few tokens have two letters
    assert control(server, "llm", "load")[0] == 200
    again, found = ask(server, SYSTEM + "Who?")
    assert again == answer
    assert found >= 16 * (num_files - 1)
    assert settled(server, "octavo:prefix_cache_disk_hits_total") == found

    ask(server, OTHER + "One?")
    answer, found = ask(server, OTHER + "Two?")
    wait_until(lambda: len(list(cache.rglob("*.kv"))) >= num_files + found // 16, "not saved", 60)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    other = start_server(repository)
    assert ask(other, OTHER + "Two?") == (answer, found)
