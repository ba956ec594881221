"""Locust itself, as a process: users of each transport against scripted servers and a real one."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ports import free_ports
from scripted_http import CHUNKED, Request, answer, chunk, event

FOLDER = Path(__file__).parents[2] / "loadtest"
TOKENS = 4
TTFT_S, GAP_S = 0.05, 0.02


def streams(request: Request, connection: socket.socket) -> None:
    """Triton's events or OpenAI's; a token each 20 ms after the first 50."""
    openai = "/v1/" in request.line
    connection.sendall(CHUNKED)
    time.sleep(TTFT_S)
    for index in range(TOKENS):
        if openai:
            part = {"delta": {"content": "a"}} if "chat" in request.line else {"text": "a"}
            connection.sendall(chunk(event(choices=[{"index": 0, **part}])))
        else:
            reason = "length" if index == TOKENS - 1 else "None"
            counts = {"num_input_tokens": 9, "num_output_tokens": 1}
            connection.sendall(chunk(event(text_output="a", finish_reason=reason, **counts)))
        time.sleep(GAP_S)
    if openai:
        usage = {"prompt_tokens": 9, "completion_tokens": TOKENS}
        connection.sendall(chunk(event(choices=[], usage=usage)) + chunk(b"data: [DONE]\n\n"))
    connection.sendall(b"0\r\n\r\n")


def locust(*arguments: str, seconds: int = 3) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(FOLDER / "locustfile.py"), "--headless"]
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    return subprocess.run(
        [*command, "--only-summary", "-t", f"{seconds}s", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("transport", "workload"), [("http", "code"), ("openai", "chat"), ("openai", "code")]
)
def test_a_closed_loop_reports_what_the_server_did(
    serve: Any, tmp_path: Path, transport: str, workload: str
) -> None:
    server = serve(streams)
    path = tmp_path / "deeper" / "report.json"
    slo = ("--slo-ttft-ms", "1000", "--slo-tpot-ms", "1000")
    done = locust(
        "--transport", transport, f"--{transport}-url", server.url, "--workload", workload, "-u", "3",
        "-r", "9",
        "--report-json", str(path), "--report", str(path.with_suffix(".html")), *slo,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    total = data["total"]
    assert total["requests"] == total["succeeded"] == len(server.requests) > 2
    assert total["output_tokens"] == TOKENS * total["requests"]
    assert total["prompt_tokens"] == 9 * total["requests"]
    assert TTFT_S * 1000 <= total["ttft_ms"]["p50"] < 1000
    assert GAP_S * 1000 <= total["itl_ms"]["p50"] < 200
    assert total["tpot_ms"]["p50"] == pytest.approx(total["itl_ms"]["p50"], rel=0.5)
    assert data["slo"]["met"] is True
    for row in ("e2e", "ttft", "tpot", "itl", "e2e, good"):
        assert re.search(rf"{transport}\s+{workload} {row}\s+\d+\s+0\(0\.00%\)", done.stdout + done.stderr), (
            row
        )
    assert data["rows"][0]["transport"] == transport
    prompts = [request.body.get("prompt") or request.body.get("text_input") for request in server.requests]
    assert len({str(prompt) for prompt in prompts}) > (2 if workload == "code" else 0)
    assert not any(prompt in path.with_suffix(".html").read_text() for prompt in prompts if prompt)


def test_a_missed_promise_and_failures_by_code(serve: Any, tmp_path: Path) -> None:
    calls = iter(range(10_000))

    def half_refused(request: Request, connection: socket.socket) -> None:
        if next(calls) % 2:
            connection.sendall(answer(b'{"error":"[UNAVAILABLE] the queue is full"}', "400 Bad Request"))
        else:
            streams(request, connection)

    server = serve(half_refused)
    path = tmp_path / "report.json"
    base = ("--transport", "http", "--http-url", server.url, "--workload", "code", "--report-json", str(path))
    done = locust(*base, "--slo-ttft-ms", "1000", "-u", "2", "-r", "9")
    assert done.returncode == 3, done.stderr
    data = json.loads(path.read_text())
    assert data["errors"]["UNAVAILABLE"]["first"] == "the queue is full"
    assert 0.2 < data["slo"]["attained"] < 0.8
    assert re.search(r"\d+\s+http\s+code e2e:? .*UNAVAILABLE", done.stdout + done.stderr)
    assert locust(*base).returncode == 1  # no SLO stated: errors decide


def test_an_open_loop_does_not_wait_for_answers(serve: Any, tmp_path: Path) -> None:
    """At 40 a second a server that takes 1 s: a closed loop of one user would ask twice."""

    def slow(request: Request, connection: socket.socket) -> None:
        time.sleep(1.0)
        streams(request, connection)

    server = serve(slow)
    path = tmp_path / "report.json"
    done = locust(
        "--transport", "http", "--http-url", server.url, "--workload", "code", "--arrivals", "poisson",
        "--rate", "40", "--max-in-flight", "30", "--report-json", str(path), "-u", "1",
    )  # fmt: skip
    data = json.loads(path.read_text())
    assert data["sender"]["most_in_flight"] == 30, done.stderr
    assert data["sender"]["not_sent"] > 5
    assert data["total"]["errors"] == {"NOT_SENT": data["sender"]["not_sent"]}
    assert data["total"]["ttft_ms"]["p50"] >= 1000
    assert data["total"]["succeeded"] == len(server.requests) >= 30


def test_a_trace_is_played_once(serve: Any, tmp_path: Path) -> None:
    server = serve(streams)
    requests = tmp_path / "mine.jsonl"
    requests.write_text("\n".join(json.dumps({"prompt": f"p{i}", "at_s": i / 10}) for i in range(8)))
    path = tmp_path / "report.json"
    done = locust(
        "--transport", "http", "--http-url", server.url, "--workload", str(requests), "--arrivals", "trace",
        "--report-json", str(path), seconds=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(request.body["text_input"] for request in server.requests) == [f"p{i}" for i in range(8)]
    due_s = [entry["due_s"] for entry in json.loads(path.read_text())["timeline"]["requests"]]
    assert due_s == pytest.approx([i / 10 for i in range(8)], abs=0.002)


def test_nobody_there_and_wrong_options() -> None:
    (port,) = free_ports(1)
    gone = locust("--grpc-url", f"grpc://127.0.0.1:{port}")
    assert gone.returncode == 1
    assert "UNAVAILABLE" in gone.stderr + gone.stdout
    wrong = locust("--workload", "chatt")
    assert wrong.returncode == 2
    assert "error: --workload 'chatt' is none; allowed: chat, code" in wrong.stderr


def test_make_loadtest_on_a_real_server(tmp_path: Path) -> None:
    """Over gRPC, in steps, with the metrics over time."""
    requests = tmp_path / "short.jsonl"
    requests.write_text('{"prompt": "One two three", "max_tokens": 4}')
    done = subprocess.run(
        [
            *(sys.executable, str(FOLDER / "load_run.py"), "--seconds", "3", "--output", str(tmp_path), "--"),
            *("--workload", str(requests), "--steps", "1,2"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "report.json").read_text())
    assert [step["users"] for step in data["steps"]] == [1, 2]
    assert data["rows"][0]["transport"] == "grpc"
    assert data["total"]["succeeded"] == data["total"]["requests"] > 2
    assert any(moment["running"] > 0 for moment in data["timeline"]["metrics"])
    assert max(moment["blocks_used"] for moment in data["timeline"]["metrics"]) > 0
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert f"report: {tmp_path / 'report.html'}" in done.stdout
