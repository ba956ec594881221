"""`octavo doctor`: what is wrong with this machine, or with a running server, and what to do about it.

Owns the command, the form of its checks, and those of the base install. More come from entry points in the
group `octavo.doctor`: functions that take the model repository (or None) and return checks, such as those of
the server in `octavo.serving.doctor`. A check is a name and a function without arguments that returns its
status ("ok", "warning", "problem"), what was found, and what to do about it ("" for nothing). One that raises
is a problem itself. Exit status: 1 when there is a problem.
"""

import dataclasses
import importlib.metadata
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer

from octavo_client import _metrics
from octavo_client._base import Address
from octavo_client._client import Client
from octavo_client._errors import OctavoError
from octavo_client._types import TLS, Retries, SamplingParams

CHECK_GROUP = "octavo.doctor"
PYTHONS = ((3, 11), (3, 12))
_PACKAGES = ("octavo", "numpy", "httpx", "tritonclient")
_PROBE_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 60.0

Outcome = tuple[str, str, str]
Check = tuple[str, Callable[[], Outcome]]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: str  # ok, warning or problem
    found: str
    advice: str


def doctor(
    model_repository: Annotated[
        Path | None,
        typer.Option(
            help="A model repository to look at; ./model_repository where there is one.", show_default=False
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="That is to be free.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="That is to be free.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="That is to be free.")] = 8002,
    url: Annotated[
        str | None, typer.Option(help="Also check a server that runs there; no port has to be free then.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="Where that server's metrics are.")] = None,
    model: Annotated[str, typer.Option(help="The model to ask there.")] = "llm",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check this machine, and a running server, and say what to do about what is wrong."""
    default = Path("model_repository")
    repository = model_repository or (default if default.is_dir() else None)
    checks = [*base_checks(), *plugged_in(repository)]
    if url is None:
        ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        checks += [port_check(service, port) for service, port in ports.items()]
    else:
        checks += server_checks(url, metrics_url, model)
    findings = []
    for check in checks:
        finding = run(check)
        findings.append(finding)
        if not as_json:
            _print(finding)
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"problems": problems, "checks": found}, indent=2))
    else:
        warnings = sum(finding.status == "warning" for finding in findings)
        print(f"{problems} problems, {warnings} warnings, {len(findings)} checks")
    raise typer.Exit(1 if problems else 0)


def run(check: Check) -> Finding:
    name, ask = check
    try:
        return Finding(name, *ask())
    except Exception as error:
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(name, "problem", found, "report this line as a fault of octavo doctor")


def base_checks() -> list[Check]:
    checks: list[Check] = [("python", lambda: python_outcome(sys.version_info[:2]))]
    return checks + [(name, partial(_package, name)) for name in _PACKAGES]


def python_outcome(version: tuple[int, int]) -> Outcome:
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    if version in PYTHONS:
        return "ok", found, ""
    return "problem", found, "make the environment with Python 3.11 or 3.12"


def _package(name: str) -> Outcome:
    try:
        return "ok", importlib.metadata.version(name), ""
    except importlib.metadata.PackageNotFoundError:
        return "problem", "not installed", "pip install --force-reinstall octavo"


def plugged_in(repository: Path | None) -> Iterator[Check]:
    """The checks of what else is installed, or one that says what is not."""
    for entry in entry_points(group=CHECK_GROUP):
        yield from _checks_of(entry, repository)


def _checks_of(entry: EntryPoint, repository: Path | None) -> Sequence[Check]:
    try:
        checks: Sequence[Check] = entry.load()(repository)
    except ModuleNotFoundError as error:
        missing, extra = error.name, next(iter(entry.extras), entry.name)
        outcome: Outcome = (
            "warning",
            f"not installed: there is no {missing}; clients work without it",
            f"to serve models on this machine: pip install 'octavo[{extra}]'",
        )
        return [(entry.name, lambda: outcome)]
    except Exception as error:
        failed = error

        def fail() -> Outcome:
            raise failed

        return [(entry.name, fail)]
    return checks


def port_check(service: str, port: int) -> Check:
    return f"{service} port", lambda: _port(service, port)


def _port(service: str, port: int) -> Outcome:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that is winding down is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return "ok", f"{port} is free", ""
    another = f"start with another one: octavo serve --{service}-port PORT"
    who = _who_answers(service, port)
    if who is None:
        return "problem", f"{port} cannot be used: {reason}", f"{another}, or end the program that has it"
    return (
        "warning",
        f"{port} is taken by {who}",
        f"check it: octavo doctor --url URL; for one more, {another}",
    )


def _who_answers(service: str, port: int) -> str | None:
    """A Triton server that runs there; None for anybody else."""
    retries = Retries(attempts=1)
    if service == "metrics":
        try:
            text = _metrics.fetch(f"http://127.0.0.1:{port}/metrics", TLS())
        except OctavoError:
            return None
        return "a Triton server's metrics" if "nv_inference" in text or "vllm:" in text else None
    scheme = "http" if service == "http" else "grpc"
    with Client(
        f"{scheme}://127.0.0.1:{port}", connect_timeout_s=_PROBE_TIMEOUT_S, retries=retries
    ) as client:
        return "a Triton server" if client.health().live else None


def server_checks(url: str, metrics_url: str | None, model: str) -> list[Check]:
    """Of a server that runs: is it there, does the model take requests and answer one, are there metrics."""
    try:
        address = Address.parse(url, metrics_url)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None

    def connect() -> Client:
        return Client(url, model=model, retries=Retries(attempts=1), metrics_url=metrics_url)

    def reach() -> Outcome:
        with connect() as client:
            health = client.health()
        if not health.live:
            return "problem", f"no server answers at {url}", "start one (octavo serve), or correct --url"
        if not health.model_ready:
            return (
                "problem",
                f"the server at {url} is there, and the model {model!r} takes no requests",
                "wait until it is loaded, name another with --model, or load it anew",
            )
        return "ok", f"{url}: live, the model {model!r} is ready", ""

    def contract() -> Outcome:
        with connect() as client:
            info = client.model_info()
        if not info.decoupled:
            return "problem", f"{model!r} is no decoupled model", "name the language model with --model"
        missing = [name for name in ("messages", "input_ids", "cancel_request_id") if not info.takes(name)]
        if missing:
            return (
                "warning",
                f"{model!r} has no {', '.join(missing)}, as Triton's vLLM backend has none",
                "chats, token ids and cancelling by id need Octavo: octavo serve --as vllm",
            )
        return "ok", f"backend {info.backend!r}, versions {', '.join(info.versions)}", ""

    def answer() -> Outcome:
        with connect() as client:
            params = SamplingParams(max_tokens=1, temperature=0)
            try:
                done = client.generate("Hello", params, timeout_s=_ANSWER_TIMEOUT_S)
            except OctavoError as error:
                return "problem", f"[{error.code}] {error}", "look into the server's log"
        return "ok", f"{done.usage.completion_tokens} token to {done.usage.prompt_tokens}", ""

    def metrics() -> Outcome:
        try:
            found = _metrics.parse(_metrics.fetch(address.metrics_url, TLS()))
        except OctavoError as error:
            return "warning", str(error), "name the place with --metrics-url; octavo top needs it"
        ready = found.select("octavo:ready", model=model)
        if any(sample.value == 0 for sample in ready):
            return "problem", f"octavo:ready is 0 for {model!r}", "unload the model and load it again"
        count = sum(sample.name.startswith(("vllm:", "octavo:")) for sample in found)
        if not count:
            return (
                "warning",
                f"{address.metrics_url} has no vllm: series",
                "set REPORT_CUSTOM_METRICS to true in config.pbtxt",
            )
        return "ok", f"{address.metrics_url}: {count} series of the model's", ""

    return [("server", reach), ("model", contract), ("answer", answer), ("metrics", metrics)]


def _print(finding: Finding) -> None:
    print(f"{finding.status:<8} {finding.check:<18} {finding.found}")
    if finding.advice and finding.status != "ok":
        print(f"{'':<28}-> {finding.advice}")
    sys.stdout.flush()
