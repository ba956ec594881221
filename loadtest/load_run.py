"""`make loadtest`: a server on free ports, a load test of it, a report. Arguments after `--` are Locust's.

    python loadtest/load_run.py --seconds 120 --output build/loadtest -- --workload chat

Without arguments: short chats, the number of users rising step by step, and a promise that two cores can
keep. The exit code is Locust's: 0, 1 after a request that failed, 3 after a missed SLO.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from octavo.serving.launcher import RunningServer
from octavo_client import Client, SamplingParams
from servers import REPOSITORY, gateway_before, serving

_FOLDER = Path(__file__).parent
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
    parser.add_argument("--model-repository", type=Path, default=REPOSITORY)
    parser.add_argument("--ui", action="store_true", help="Locust's web UI instead of a run of --seconds")
    parser.add_argument("locust", nargs="*", help="more arguments for Locust, after --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends too
    with ExitStack() as stack:
        log = args.output / "server.log"
        print(f"starting a server; its log: {log}", flush=True)
        server = stack.enter_context(serving(args.model_repository, log, _START_TIMEOUT_S))
        _warm_up(server)
        urls = ["--grpc-url", f"grpc://{server.grpc}", "--http-url", f"http://{server.http}"]
        urls += ["--metrics-url", f"http://{server.metrics}/metrics"]
        if "openai" in _value(args.locust, "--transport", "grpc"):
            try:
                port = stack.enter_context(gateway_before(server, args.output / "gateway.log"))
            except RuntimeError as error:
                raise SystemExit(f"error: {error}") from None
            urls += ["--openai-url", f"http://127.0.0.1:{port}"]
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


def _warm_up(server: RunningServer) -> None:
    """Its kernels are compiled then."""
    with Client(f"grpc://{server.grpc}", timeout_s=_START_TIMEOUT_S) as client:
        client.generate(_WARM_UP_PROMPT, SamplingParams(max_tokens=16, temperature=0))


if __name__ == "__main__":
    sys.exit(main())
