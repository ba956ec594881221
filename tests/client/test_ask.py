"""`octavo generate` and `octavo chat`, as processes of their own that talk to a server of a few lines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ports import free_ports
from scripted_http import CHUNKED, Request, Server, answer, chunk, event, sends


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo_client", *arguments]


def octavo(*arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), input=typed, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(
        sends(CHUNKED, chunk(event(text_output="Hel")), chunk(event(text_output="lo")), chunk(b""))
    )
    yield server
    server.close()


def test_generate_prints_the_continuation(server: Server) -> None:
    ran = octavo("generate", "Say", "--url", server.url, "--max-tokens", "3", "--stop", "a", "--stop", "b")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Hello\n", "")
    (request,) = server.requests
    assert request.body["text_input"] == "Say"
    assert json.loads(request.body["sampling_parameters"]) == {"max_tokens": 3, "stop": ["a", "b"]}


def test_generate_reads_standard_input_and_prints_json(server: Server) -> None:
    server.script = sends(
        answer(b'{"text_output":"!","finish_reason":"stop","num_output_tokens":1,"token_ids":9}')
    )
    ran = octavo("generate", "-", "--json", "--url", server.url, typed="Hello")
    assert server.requests[0].body["text_input"] == "Hello"
    (choice,) = json.loads(ran.stdout)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("!", "stop", [9])


def test_what_is_wrong_is_one_line(server: Server) -> None:
    server.script = sends(answer(b'{"error":"[INVALID_ARG] \'n\' is 0"}', "400 Bad Request"))
    ran = octavo("generate", "x", "--url", server.url)
    assert (ran.returncode, ran.stderr) == (1, "error: [INVALID_ARG] 'n' is 0\n")
    for name in ("generate", "chat"):
        ran = octavo(
            name, *(["x"] if name == "generate" else []), "--url", f"http://127.0.0.1:{free_ports(1)[0]}"
        )
        assert ran.returncode == 1
        assert ran.stderr.startswith("error: [UNAVAILABLE] no connection to the server")
        assert ran.stderr.count("\n") == 1
    ran = octavo("chat", "--url", "ftp://x")
    assert ran.returncode == 2
    assert "is no server's URL" in ran.stderr.replace("\n", " ")


def talk(request: Request, connection: socket.socket) -> None:
    """Knows its model, refuses "bad", and answers all else with how many messages there are."""
    if request.line.startswith("GET"):
        connection.sendall(answer(b'{"name":"llm"}'))
        return
    messages = json.loads(request.body["messages"])
    if messages[-1]["content"] == "bad":
        connection.sendall(answer(event(error="[INVALID_ARG] bad"), "400 Bad Request"))
        return
    connection.sendall(CHUNKED + chunk(event(text_output=f"{len(messages)} messages")))
    if messages[-1]["content"] != "long":
        connection.sendall(chunk(b""))


def test_a_chat_keeps_what_was_said_and_leaves_out_what_failed(server: Server) -> None:
    server.script = talk
    ran = octavo("chat", "--url", server.url, "--system", "Be brief.", typed="one\nbad\n\ntwo\n/new\nthree\n")
    assert ran.returncode == 0
    assert ran.stdout == "2 messages\n4 messages\n2 messages\n"
    assert ran.stderr == "error: [INVALID_ARG] bad\n"
    said = json.loads(server.requests[4].body["messages"])
    assert [(message["role"], message["content"]) for message in said] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "2 messages"),
        ("user", "two"),
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: Server) -> None:
    server.script = talk
    with subprocess.Popen(
        command("chat", "--url", server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"long\n")
        process.stdin.flush()
        assert process.stdout.read(10) == b"1 messages"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b" [stopped]\n"
        deadline_s = time.monotonic() + 10
        while not server.cancelled:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        rest, errors = process.communicate(b"short\n", timeout=30)
        assert (rest, errors, process.returncode) == (b"3 messages\n", b"", 0)
    assert server.cancelled == [server.requests[2].body["id"]]
