"""`octavo bench` against a server of a few lines, and the figures that it makes of times that are known."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo_client import AsyncClient, MockTransport, Unavailable
from octavo_client._load import Load, Percentiles, Prompts, Run, Sent
from ports import free_ports
from scripted_http import CHUNKED, Request, Server, answer, chunk, event

INPUTS = [{"name": name, "datatype": "BYTES", "shape": [1]} for name in ("text_input", "input_ids")]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo_client", "bench", *arguments]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)


def model(
    inputs: list[dict[str, Any]], answers: Callable[[Request, int], list[bytes]], pause_s: float = 0.0
) -> Server:
    """Answers the n-th generation, from 0, with the events of `answers`."""
    generations: list[Request] = []

    def script(request: Request, connection: socket.socket) -> None:
        if request.line.startswith("GET"):
            connection.sendall(answer(json.dumps({"name": "llm", "inputs": inputs}).encode()))
            return
        generations.append(request)
        events = answers(request, len(generations) - 1)
        if events and events[0].startswith(b"HTTP"):
            connection.sendall(events[0])
            return
        connection.sendall(CHUNKED)
        for one in events:
            time.sleep(pause_s)
            connection.sendall(chunk(one))
        connection.sendall(chunk(b""))

    return Server(script)


def tokens(request: Request, number: int) -> list[bytes]:
    """Two responses: of one token, and of all others."""
    del number
    wanted = json.loads(request.body["sampling_parameters"])["max_tokens"]
    prompt = request.body.get("input_ids") or request.body["text_input"].split()
    count = {"num_input_tokens": len(prompt)}
    last = event(text_output="b", num_output_tokens=wanted - 1, finish_reason="length", **count)
    return [event(text_output="a", num_output_tokens=1, **count), last]


def rows(stdout: str) -> dict[str, list[str]]:
    """Of the table: the words after the name, which takes 30 characters."""
    return {line[:30].strip(): line[30:].split() for line in stdout.splitlines() if len(line) > 30}


def test_what_is_counted_is_the_servers_count(tmp_path: Path) -> None:
    server = model(INPUTS, tokens)
    try:
        options = ["--requests", "6", "--concurrency", "2", "--input-tokens", "10", "--output-tokens", "5"]
        ran = bench(server.url, *options, "--shared-prefix", "4", "--json", str(tmp_path / "figures"))
    finally:
        server.close()
    assert (ran.returncode, ran.stderr) == (0, "")
    table = rows(ran.stdout)
    assert (table["requests ok"], table["requests failed"]) == (["6"], ["0"])
    assert (table["tokens in"], table["tokens out"]) == (["60"], ["30"])
    assert "random token ids, the first 4 tokens shared" in ran.stdout
    assert "after a warm-up of 2 requests" in ran.stdout
    written = json.loads((tmp_path / "figures").read_text())
    assert written["figures"]["output_tokens"] == 30
    assert written["load"]["input_tokens"] == 10
    rate = written["figures"]["output_tokens"] / written["figures"]["duration_s"]
    assert written["figures"]["output_tokens_per_s"] == pytest.approx(rate, abs=0.01)
    generated = [request.body for request in server.requests if request.body]
    prompts = [tuple(body["input_ids"]) for body in generated]
    assert len(prompts) == len(set(prompts)) == 8
    assert len({prompt[:4] for prompt in prompts}) == 1
    assert len({prompt[4] for prompt in prompts}) > 1
    assert json.loads(generated[-1]["sampling_parameters"]) == {
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
    }


def test_a_model_without_ids_gets_texts_of_about_that_length() -> None:
    def two_a_word(request: Request, number: int) -> list[bytes]:
        del number
        words = len(request.body["text_input"].split())
        return [event(text_output="a", num_output_tokens=1, num_input_tokens=2 * words)]

    server = model(INPUTS[:1], two_a_word)
    try:
        ran = bench(server.url, "--requests", "2", "--concurrency", "1", "--input-tokens", "12")
    finally:
        server.close()
    lengths = [len(request.body["text_input"].split()) for request in server.requests if request.body]
    assert lengths == [12, 6, 6, 6]  # the first one tells how many tokens a word has
    assert rows(ran.stdout)["tokens in"] == ["24"]
    assert "random words" in ran.stdout


def test_failures_are_counted_by_code_and_make_it_fail() -> None:
    full = answer(b'{"error":"[UNAVAILABLE] the queue is full"}', "400 Bad Request")

    def every_other(request: Request, number: int) -> list[bytes]:
        return [full] if number % 2 else tokens(request, number)

    server = model(INPUTS, every_other)
    try:
        ran = bench(server.url, "--requests", "5", "--concurrency", "1")
    finally:
        server.close()
    assert ran.returncode == 1
    table = rows(ran.stdout)  # the first generation, a success, warms up
    assert table["requests ok"] == ["2"]
    assert table["requests failed"] == ["3", "(3", "UNAVAILABLE)"]
    assert ran.stderr == "error: 3 x [UNAVAILABLE] the queue is full\n"


def test_a_server_that_is_not_there_and_what_is_no_url() -> None:
    ran = bench(f"http://127.0.0.1:{free_ports(1)[0]}")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: [UNAVAILABLE] no connection to the server")
    assert bench("ftp://x").returncode == 2
    assert bench("--shared-prefix", "9", "--input-tokens", "8").returncode == 2


def test_ctrl_c_prints_what_has_been_measured() -> None:
    def slow_third(request: Request, number: int) -> list[bytes]:
        return tokens(request, number) if number < 3 else [event(text_output="a", num_output_tokens=1)] * 3000

    server = model(INPUTS, slow_third, pause_s=0.01)
    try:
        with subprocess.Popen(
            command(server.url, "--seconds", "60", "--concurrency", "1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            deadline_s = time.monotonic() + 30
            while sum(bool(request.body) for request in server.requests) < 4:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
        deadline_s = time.monotonic() + 10
        while not server.cancelled:  # the one that ran does not run on
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        server.close()
    assert (process.returncode, stderr) == (130, "")
    table = rows(stdout)
    assert (table["requests ok"], table["requests unfinished"]) == (["2"], ["1"])
    assert "interrupted" in stdout


async def measured(load: Load, mock: MockTransport) -> Run:
    async with AsyncClient(transport=mock) as client:
        run = Run(load, client, as_ids=True)
        await run.measure(lambda run: None)
    return run


def test_the_rate_is_a_poisson_process_that_waits_for_nobody() -> None:
    import asyncio

    mock = MockTransport(lambda request: ["a"])
    run = asyncio.run(measured(Load(requests=20, rate=200.0, concurrency=None, seed=3), mock))
    starts_s = [sent.started_s - run.started_s for sent in run.sent]
    drawn, due_s, expected = random.Random(4), 0.0, []
    for _ in range(20):
        due_s += drawn.expovariate(200.0)
        expected.append(due_s)
    assert starts_s == pytest.approx(expected, abs=1e-9)
    run = asyncio.run(measured(Load(seconds=0.1, rate=100.0, concurrency=1), mock))
    assert 1 <= len(run.sent) <= 30
    assert all(sent.started_s - run.started_s < 0.1 for sent in run.sent)


def test_figures_of_known_times() -> None:
    run = Run(Load(), AsyncClient(transport=MockTransport(lambda request: "a")), as_ids=True)
    run.started_s = 100.0
    run.sent = [
        Sent(100.0, 104.0, [101.0, 102.0, 104.0], first_tokens=1, prompt_tokens=7, output_tokens=4),
        Sent(101.0, 110.0, [105.0, 110.0], first_tokens=2, prompt_tokens=3, output_tokens=7),
        Sent(102.0, 103.0, error=Unavailable("full")),
        Sent(109.0),
    ]
    figures = run.figures()
    assert (figures.ok, figures.failed, figures.unfinished) == (2, {"UNAVAILABLE": 1}, 1)
    assert figures.first_errors == {"UNAVAILABLE": "full"}
    assert (figures.duration_s, figures.prompt_tokens, figures.output_tokens) == (10.0, 10, 11)
    assert (figures.requests_per_s, figures.output_tokens_per_s) == (0.2, 1.1)
    assert figures.ttft_ms == Percentiles(1000.0, 4000.0, 4000.0)
    assert figures.tpot_ms == Percentiles(1000.0, 1000.0, 1000.0)  # 3 s for 3 tokens, 5 s for 5
    assert figures.itl_ms == Percentiles(2000.0, 5000.0, 5000.0)
    assert figures.e2e_ms == Percentiles(4000.0, 9000.0, 9000.0)
    assert Percentiles.of([]) == Percentiles(None, None, None)
    assert Percentiles.of([i / 1000 for i in range(1, 101)]) == Percentiles(50.0, 90.0, 99.0)


def test_a_seed_draws_the_same_prompts() -> None:
    load = Load(input_tokens=20, shared_prefix=5)
    one, other = Prompts(load, as_ids=True), Prompts(load, as_ids=True)
    assert [one.next() for _ in range(3)] == [other.next() for _ in range(3)]
    assert one.next() != Prompts(Load(input_tokens=20, shared_prefix=5, seed=1), as_ids=True).next()
    words = Prompts(load, as_ids=False)
    first, second = str(words.next()).split(), str(words.next()).split()
    assert (len(first), first[:5] == second[:5], first[5:] == second[5:]) == (20, True, False)


def test_help_needs_nothing_slow() -> None:
    program = (
        "import sys, octavo_client.bench, octavo_client.top, octavo_client.doctor\n"
        "print({'httpx', 'numpy', 'grpc', 'torch'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
