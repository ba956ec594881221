"""`octavo gateway` as a process: how it ends."""

import signal
import socket
import subprocess
import sys
import time

import httpx

from ports import free_ports

NO_SERVER = "grpc://127.0.0.1:1"


def start(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo_client", "gateway", NO_SERVER, "--port", str(port)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            httpx.get(url)
            return
        except httpx.ConnectError:
            time.sleep(0.05)
    raise TimeoutError(url)


def test_a_page_that_looks_on_does_not_hold_up_the_end() -> None:
    (port,) = free_ports(1)
    with start(port) as gateway:
        wait_for(f"http://127.0.0.1:{port}/health")
        with httpx.stream("GET", f"http://127.0.0.1:{port}/live") as live:
            assert next(live.iter_lines()).startswith("data: ")
            began_s = time.monotonic()
            gateway.send_signal(signal.SIGTERM)
            assert gateway.wait(9) == -signal.SIGTERM  # less than what answers in flight are given
            assert time.monotonic() - began_s < 5


def test_a_port_that_is_taken_is_named_and_the_exit_code_tells() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = start(port)
        _, said = gateway.communicate(timeout=20)
    assert gateway.returncode != 0
    assert "address already in use" in said
    assert str(port) in said
