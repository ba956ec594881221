"""`make loadtest`: a server on free ports, a load test of it, a report. Arguments after `--` are Locust's.

    python loadtest/load_run.py --seconds 120 --output build/loadtest -- --workload chat

Without arguments: short chats, the number of users rising step by step, and a promise that two cores can
keep. The exit code is Locust's: 0, 1 after a request that failed, 3 after a missed SLO.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from octavo.serving import installation
from octavo.serving.launcher import LaunchOptions, RunningServer
from octavo_client import Client, SamplingParams
from peer_streams import free_ports

_FOLDER = Path(__file__).parent
_REPOSITORY = _FOLDER.parent / "model_repository"
_START_TIMEOUT_S = 180.0
_WARM_UP_PROMPT = "One two three four five six seven eight nine ten. " * 8
_STEPS = (1, 2, 4, 8)
# Kept on two cores without AVX-512, at eight users at once; a promise to people would be stricter.
_SLO = ("--slo-ttft-ms", "15000", "--slo-tpot-ms", "750")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=Path("build/loadtest"))
    parser.add_argument("--model-repository", type=Path, default=_REPOSITORY)
    parser.add_argument("--ui", action="store_true", help="Locust's web UI instead of a run of --seconds")
    parser.add_argument("locust", nargs="*", help="more arguments for Locust, after --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends too
    with ExitStack() as stack:
        server = stack.enter_context(_server(args.model_repository, args.output / "server.log"))
        urls = ["--grpc-url", f"grpc://{server.grpc}", "--http-url", f"http://{server.http}"]
        urls += ["--metrics-url", f"http://{server.metrics}/metrics"]
        if "openai" in _value(args.locust, "--transport", "grpc"):
            urls += ["--openai-url", stack.enter_context(_gateway(server.grpc, args.output / "gateway.log"))]
        command = [sys.executable, "-m", "locust", "-f", str(_FOLDER / "locustfile.py"), *urls]
        command += ["--report", str(args.output / "report.html")]
        command += ["--report-json", str(args.output / "report.json")]
        command += [] if args.ui else ["--headless", "--only-summary"]
        command += _load(args.locust, args.seconds, args.ui)
        signal.signal(signal.SIGINT, lambda *_: None)  # Locust gets it too, and writes its report
        code = subprocess.call([*command, *args.locust])
    if not args.ui:
        print(f"report: {args.output / 'report.html'}, its numbers: {args.output / 'report.json'}")
    return code


def _load(given: Sequence[str], seconds: float, ui: bool) -> list[str]:
    """What to do unless the arguments say: users in steps, in a closed loop."""
    load = [] if "--workload" in given else ["--workload", "chat", "--max-tokens", "32"]
    if not {"--slo-ttft-ms", "--slo-tpot-ms"} & set(given):
        load += _SLO
    if ui:
        return load
    closed = _value(given, "--arrivals", "closed") == "closed"
    if closed and not {"--steps", "-u", "--users"} & set(given):
        given = [*given, "--steps", ",".join(map(str, _STEPS))]
        load += ["--steps", ",".join(map(str, _STEPS))]
    if "--steps" in given:
        count = len(_value(given, "--steps", "").split(","))
        return [*load, "--step-seconds", f"{seconds / count:g}"]
    return [*load, "--run-time", f"{seconds:g}s"]


def _value(arguments: Sequence[str], name: str, default: str) -> str:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return default


@contextlib.contextmanager
def _server(repository: Path, log: Path) -> Iterator[RunningServer]:
    """Ready, and warm: its kernels are compiled."""
    http_port, grpc_port, metrics_port = free_ports(3)
    options = LaunchOptions(repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    print(f"starting a server; its log: {log}", flush=True)
    with RunningServer.start(options, installation.find(), log) as server:
        server.wait_ready(_START_TIMEOUT_S)
        with Client(f"grpc://{server.grpc}", timeout_s=_START_TIMEOUT_S) as client:
            client.generate(_WARM_UP_PROMPT, SamplingParams(max_tokens=16, temperature=0))
        yield server


@contextlib.contextmanager
def _gateway(grpc: str, log: Path) -> Iterator[str]:
    """The OpenAI endpoint in front of the server: its URL."""
    (port,) = free_ports(1)
    program = Path(sys.executable).with_name("octavo")
    command = [str(program) if program.exists() else shutil.which("octavo") or "octavo", "gateway"]
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, f"grpc://{grpc}", "--port", str(port)], stdout=output, stderr=output
        ) as gateway,
    ):
        try:
            deadline_s = time.monotonic() + 30
            while not _answers(f"{url}/v1/models"):
                if gateway.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"error: the gateway did not start; its log: {log}")
                time.sleep(0.1)
            yield url
        finally:
            gateway.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
