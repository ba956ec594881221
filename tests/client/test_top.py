"""`octavo top`: what two readings say, and the command on a terminal, in a pipe, and with no server."""

import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl

import pytest

from octavo_client import ServerUnreachable
from octavo_client._metrics import Metrics, parse
from octavo_client._watch import Instance, Quantiles, views
from octavo_client.top import Watch, sparkline, text
from ports import free_ports
from scripted_http import Request, Server, answer

LABELS = 'model="llm",version="1"'


def reading(
    tokens_in: float, tokens_out: float, hits: float, queries: float, first_token: tuple[int, int, int]
) -> str:
    """Of two instances. `first_token`: cumulative counts up to 0.1 s, 0.2 s, and all."""
    upto_100, upto_200, all_ = first_token
    return f"""
# HELP octavo:ready 1 while the model takes requests
octavo:ready{{instance="llm_0_0",{LABELS}}} 1
octavo:ready{{instance="llm_0_1",{LABELS}}} 0
vllm:num_requests_running{{instance="llm_0_0",{LABELS}}} 3
vllm:num_requests_running{{instance="llm_0_1",{LABELS}}} 1
vllm:num_requests_waiting{{instance="llm_0_0",{LABELS}}} 7
vllm:kv_cache_usage_perc{{instance="llm_0_0",{LABELS}}} 0.25
octavo:kv_blocks{{instance="llm_0_0",{LABELS}}} 100
octavo:kv_blocks_used{{instance="llm_0_0",{LABELS}}} 25
octavo:kv_blocks_cached{{instance="llm_0_0",{LABELS}}} 40
octavo:kv_blocks_shared{{instance="llm_0_0",{LABELS}}} 5
vllm:prompt_tokens_total{{{LABELS}}} {tokens_in}
vllm:generation_tokens_total{{{LABELS}}} {tokens_out}
vllm:prefix_cache_hits_total{{{LABELS}}} {hits}
vllm:prefix_cache_queries_total{{{LABELS}}} {queries}
vllm:time_to_first_token_seconds_bucket{{{LABELS},le="0.1"}} {upto_100}
vllm:time_to_first_token_seconds_bucket{{{LABELS},le="0.2"}} {upto_200}
vllm:time_to_first_token_seconds_bucket{{{LABELS},le="+Inf"}} {all_}
octavo:preemptions_total{{{LABELS}}} {hits}
vllm:request_success_total{{finished_reason="stop",{LABELS}}} {hits}
octavo:refused_requests_total{{code="UNAVAILABLE",{LABELS}}} {queries}
nv_inference_request_success{{{LABELS}}} 999
"""


BEFORE = reading(100, 1000, 10, 20, (4, 4, 4))
NOW = reading(300, 1500, 40, 60, (8, 14, 14))


def test_what_a_window_says() -> None:
    (model,) = views(parse(BEFORE), parse(NOW), 2.0)
    assert (model.name, model.version) == ("llm", "1")
    assert (model.tokens_in_per_s, model.tokens_out_per_s) == (100.0, 250.0)
    assert model.prefix_hit_rate == 0.75
    assert (model.preemptions, model.preemptions_total) == (30, 40)
    assert model.outcomes == {"stop": 30, "refused UNAVAILABLE": 40}
    assert model.outcomes_total == {"stop": 40, "refused UNAVAILABLE": 60}
    # Of ten, four up to 100 ms and six up to 200: the fifth is a sixth of the way between.
    assert model.ttft.p50_ms == pytest.approx(100 + 100 / 6)
    assert model.ttft.p99_ms == pytest.approx(100 + 100 * 5.9 / 6)
    assert model.itl == model.queue == Quantiles(None, None)
    blocks = {"total": 100, "used": 25, "cached": 40, "shared": 5, "free": 75}
    assert model.instances == (
        Instance("llm_0_0", True, 3, 7, 0.25, blocks),
        Instance("llm_0_1", False, 1, None, None, {}),
    )


def test_the_first_reading_knows_no_rates_and_a_restart_begins_anew() -> None:
    (first,) = views(None, parse(NOW), 2.0)
    assert (first.tokens_out_per_s, first.prefix_hit_rate, first.preemptions) == (None, None, None)
    assert (first.ttft, first.outcomes) == (Quantiles(None, None), {})
    assert first.preemptions_total == 40
    (restarted,) = views(parse(NOW), parse(BEFORE), 2.0)
    assert (restarted.tokens_out_per_s, restarted.preemptions) == (500.0, 10)
    (idle,) = views(parse(NOW), parse(NOW), 2.0)
    assert (idle.tokens_out_per_s, idle.prefix_hit_rate, idle.ttft.p50_ms) == (0.0, None, None)


def test_a_server_with_tritons_vllm_backend() -> None:
    def vllm(tokens: int, ended: int) -> Metrics:
        return parse(
            f"vllm:generation_tokens_total{{{LABELS}}} {tokens}\n"
            f'vllm:time_per_output_token_seconds_bucket{{{LABELS},le="0.05"}} {ended}\n'
            f'vllm:time_per_output_token_seconds_bucket{{{LABELS},le="+Inf"}} {ended}\n'
            f"nv_inference_request_success{{{LABELS}}} {ended}\n"
            f'nv_inference_request_failure{{reason="OTHER",{LABELS}}} 0\n'
            'nv_inference_request_success{model="other",version="1"} 5\n'
        )

    (model,) = views(vllm(10, 1), vllm(50, 3), 4.0)
    assert model.tokens_out_per_s == 10.0
    assert (model.itl.p50_ms, model.itl.p99_ms) == (25.0, 49.5)
    assert model.outcomes == {"ok": 2, "failed": 0}
    assert model.instances == (Instance("", None, None, None, None, {}),)
    assert (model.tokens_in_per_s, model.preemptions, model.preemptions_total) == (None, None, None)


def test_beyond_the_last_bucket_is_its_bound() -> None:
    (model,) = views(parse(reading(0, 0, 0, 0, (0, 0, 0))), parse(reading(0, 0, 0, 0, (0, 0, 5))), 1.0)
    assert (model.ttft.p50_ms, model.ttft.p99_ms) == (200.0, 200.0)


def test_a_server_that_goes_away_and_comes_back() -> None:
    answers: list[str | None] = [BEFORE, NOW, None, BEFORE]

    def read() -> Metrics:
        found = answers.pop(0)
        if found is None:
            raise ServerUnreachable("no metrics")
        return parse(found)

    watch = Watch(read, "there")
    assert watch.look().seconds is None
    assert watch.look().seconds is not None
    gone = watch.look()
    assert gone.problem == "[UNAVAILABLE] no metrics"
    shown = text(gone, watch)
    assert "no metrics now: [UNAVAILABLE] no metrics\nwhat follows is the last that was seen" in shown
    assert "llm_0_0: 3 running, 7 waiting, ready" in shown
    back = watch.look()
    assert (back.problem, back.seconds) == (None, None)
    assert back.models[0].tokens_out_per_s is None


def test_the_text_of_one_model() -> None:
    answers = [BEFORE, NOW]
    watch = Watch(lambda: parse(answers.pop(0)), "http://there/metrics")
    watch.look()
    lines = text(watch.look(), watch).splitlines()
    assert "http://there/metrics" in lines[0]
    assert lines[2:5] == [
        "llm  version 1",
        "  requests    llm_0_0: 3 running, 7 waiting, ready",
        "  KV cache    25.0% in use; blocks: 100 total, 25 used, 40 cached, 5 shared, 75 free",
    ]
    assert lines[5] == "  requests    llm_0_1: 1 running, - waiting, NOT READY"
    assert lines[-1] == "  ended       stop 30 (40), refused UNAVAILABLE 40 (60) (in all)"
    assert "  prefix hits 75.0%" in lines
    empty = Watch(lambda: parse(""), "there")
    assert "no model has reported yet" in text(empty.look(), empty)


def test_sparklines_begin_at_zero() -> None:
    assert sparkline([0, 50, 100]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


@pytest.fixture
def server() -> Iterator[Server]:
    """Counts 100 tokens more at each reading."""
    count = 0

    def script(request: Request, connection: socket.socket) -> None:
        nonlocal count
        del request
        count += 1
        connection.sendall(answer(reading(0, 100 * count, 0, 0, (0, 0, 0)).encode(), kind="text/plain"))

    server = Server(script)
    yield server
    server.close()


def command(server_url: str, *arguments: str) -> list[str]:
    where = ["--metrics-url", f"{server_url}/metrics", "--interval", "0.2"]
    return [sys.executable, "-m", "octavo_client", "top", *where, *arguments]


def test_once_as_text_and_as_json(server: Server) -> None:
    ran = subprocess.run(command(server.url, "--once"), capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "requests    llm_0_0: 3 running, 7 waiting, ready" in ran.stdout
    assert "\x1b" not in ran.stdout
    ran = subprocess.run(command(server.url, "--once", "--json"), capture_output=True, text=True, timeout=60)
    found = json.loads(ran.stdout)
    assert found["models"][0]["tokens_out_per_s"] == pytest.approx(100 / found["seconds"])
    assert found["problem"] is None
    gone = subprocess.run(
        command(f"http://127.0.0.1:{free_ports(1)[0]}", "--once"), capture_output=True, text=True, timeout=60
    )
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr.startswith("error: [UNAVAILABLE] no metrics at http://127.0.0.1:")


def test_in_a_pipe_it_prints_until_nobody_reads(server: Server) -> None:
    with subprocess.Popen(
        command(server.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            assert "\x1b" not in line
            seen += line.startswith("  tokens/s")
            if seen == 2:
                break
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


class Terminal:
    """A program on a pseudo terminal of 100 columns."""

    def __init__(self, arguments: list[str]) -> None:
        self.ours, self.theirs = pty.openpty()
        ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            arguments,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        self.seen = ""

    def read_until(self, words: str, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in self.seen:
            assert time.monotonic() < deadline_s, f"{words!r} is not in {self.seen[-3000:]!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")

    def end(self) -> int:
        """The exit status, when all of the output is read."""
        deadline_s = time.monotonic() + 20
        while self.process.poll() is None or select.select([self.ours], [], [], 0)[0]:
            assert time.monotonic() < deadline_s
            if select.select([self.ours], [], [], 0.05)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.parametrize("way", ["q", "ctrl-c", "sigterm"])
def test_on_a_terminal_it_fills_the_screen_and_restores_it(server: Server, way: str) -> None:
    terminal = Terminal(command(server.url))
    try:
        terminal.read_until("q or Ctrl-C ends")
        terminal.read_until("█")  # the second reading: there are rates
        assert "\x1b[?1049h" in terminal.seen
        assert termios.tcgetattr(terminal.theirs)[3] & termios.ICANON == 0
        if way == "q":
            os.write(terminal.ours, b"q")
        else:
            terminal.process.send_signal(signal.SIGINT if way == "ctrl-c" else signal.SIGTERM)
        assert terminal.end() == 0
        assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h")
        assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")  # the cursor is back
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_on_a_terminal_it_says_that_the_server_is_gone_and_goes_on() -> None:
    terminal = Terminal(command(f"http://127.0.0.1:{free_ports(1)[0]}"))
    try:
        terminal.read_until("no metrics now: [UNAVAILABLE]")
        assert terminal.process.poll() is None
        os.write(terminal.ours, b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()
