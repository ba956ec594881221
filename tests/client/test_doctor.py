"""`octavo doctor`: each thing is broken on purpose, and the advice must be the one that mends it."""

import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.serving import doctor as machine
from octavo.serving import installation, preflight
from octavo_client import doctor
from ports import free_ports
from scripted_http import Request, Server, answer
from toy_repository import make_toy_repository

ROOT = Path(__file__).parents[2]
NOTHING = "/nonexistent"


def outcome(check: doctor.Check) -> tuple[str, str, str]:
    finding = doctor.run(check)
    return finding.status, finding.found, finding.advice


def test_this_machine_is_fit_to_serve() -> None:
    statuses = {check[0]: doctor.run(check).status for check in machine.checks(ROOT / "model_repository")}
    assert statuses.pop("memory") in ("ok", "warning")
    assert statuses.pop("CPU") in ("ok", "warning")
    assert statuses.pop("torch") in ("ok", "warning")
    assert statuses.pop("GPU") in ("ok", "warning")
    assert set(statuses.values()) == {"ok"}


def test_a_check_that_crashes_is_a_problem_and_no_traceback() -> None:
    def crash() -> doctor.Outcome:
        raise KeyError("x")

    finding = doctor.run(("mine", crash))
    assert (finding.status, finding.found) == ("problem", "the check itself failed: KeyError: 'x'")
    broken = EntryPoint("mine", "octavo_client.doctor:PYTHONS", doctor.CHECK_GROUP)  # which cannot be called
    (check,) = doctor._checks_of(broken, None)
    assert doctor.run(check).found == "the check itself failed: TypeError: 'tuple' object is not callable"


def test_a_part_that_is_not_installed_says_which_extra() -> None:
    entry = EntryPoint("serve", "no_such_module:checks [serve]", doctor.CHECK_GROUP)
    (check,) = doctor._checks_of(entry, None)
    assert outcome(check) == (
        "warning",
        "not installed: there is no no_such_module; clients work without it",
        "to serve models on this machine: pip install 'octavo[serve]'",
    )


def test_python_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.python_outcome((3, 12))[0] == "ok"
    status, found, advice = doctor.python_outcome((3, 9))
    assert (status, found[:3], advice) == ("problem", "3.9", "make the environment with Python 3.11 or 3.12")
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    assert outcome(doctor.base_checks()[1]) == (
        "problem",
        "not installed",
        "pip install --force-reinstall octavo",
    )


def test_libpython(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = preflight.libpython_problem("libpython3.99.so.1.0")
    monkeypatch.setattr(preflight, "libpython_problem", lambda: problem)
    status, found, advice = machine.libpython()
    assert (status, found.partition(" ")[0]) == ("problem", "libpython3.99.so.1.0")
    assert "apt install libpython3.99" in advice


def test_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.build, "compiled_ahead", lambda: False)
    assert machine.compiler()[0] == "ok"
    monkeypatch.setenv("CC", "false")
    status, found, advice = machine.compiler()
    assert (status, found) == ("problem", "the C compiler 'false' does not work: ")
    assert "apt install gcc libc6-dev" in advice
    monkeypatch.setenv("CC", "no-such-compiler")
    assert machine.compiler()[1].endswith("does not work: No such file or directory")
    monkeypatch.setenv("PATH", str(tmp_path))
    status, found, advice = machine.compiler()
    assert (status, found.startswith("no C compiler")) == ("problem", True)
    assert "apt install gcc libc6-dev" in advice
    monkeypatch.setattr(machine.build, "compiled_ahead", lambda: True)
    assert machine.compiler()[0] == "ok"


def test_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = importlib.metadata.version
    monkeypatch.setattr(
        installation.importlib.metadata,
        "version",
        lambda name: "2.3.0" if name == "numpy" else versions(name),
    )
    monkeypatch.setattr(installation, "INSTALLED", tmp_path)
    monkeypatch.setattr(installation.find, "__defaults__", (tmp_path,))
    status, found, advice = machine.tritonserver()
    assert (status, advice) == ("problem", "pip install 'numpy<2'")
    assert found.startswith("numpy 2.3.0 is installed, and the tritonserver of nvidia-pytriton")
    monkeypatch.undo()
    server = installation.find()
    broken = tmp_path / "tritonserver"
    broken.write_text("#!/bin/sh\necho error while loading shared libraries: libx.so >&2\nexit 127\n")
    broken.chmod(0o755)
    values = {name: getattr(server, name) for name in installation.Installation.__slots__}
    monkeypatch.setattr(
        installation, "find", lambda: installation.Installation(**{**values, "executable": broken})
    )
    status, found, advice = machine.tritonserver()
    assert (status, found) == (
        "problem",
        f"{broken} does not start: error while loading shared libraries: libx.so",
    )
    assert "nvidia-pytriton==0.7.0" in advice
    noted = {**values, "note": "the stub is for another Python"}
    monkeypatch.setattr(installation, "find", lambda: installation.Installation(**noted))
    assert machine.tritonserver()[0] == "warning"


def test_processor_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_kernels.cpu.library.supported", list)
    status, found, advice = machine.cpu()
    assert (status, "without AVX2" in found, "slow torch reference" in advice) == ("warning", True, True)
    monkeypatch.setattr(machine, "available_bytes", lambda: 5 << 20)
    assert machine.memory()[:2] == ("warning", "5.0 MiB free")
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    status, found, advice = machine.torch_on_cpu()
    assert (status, found.endswith("4 threads, and this process may use 1 cores")) == ("warning", True)
    assert advice.endswith("OMP_NUM_THREADS=1")


def card(
    *, available: bool = True, cuda: str | None = "13.0", capability: tuple[int, int] = (9, 0)
) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: 1,
            get_device_capability=lambda index: capability,
            get_device_name=lambda index: "H200",
            mem_get_info=lambda index: (100 << 30, 139 << 30),
        ),
    )


def test_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu(card(available=False)) == ("ok", "none; Octavo computes on the CPU", "")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, NVIDIA H200'\n")
    program.chmod(0o755)
    status, found, advice = machine.gpu(card(available=False, cuda=None))
    assert (status, found) == (
        "warning",
        "driver 580.1 for 1 GPU, and torch 2.13.0 is a build without CUDA",
    )
    assert advice == "to use the GPU install a CUDA build of torch"
    status, found, advice = machine.gpu(card(available=False))
    assert (status, found) == (
        "problem",
        "driver 580.1 for 1 GPU, and torch 2.13.0 (CUDA 13.0) cannot use it",
    )
    assert "--gpus all" in advice
    status, found, advice = machine.gpu(card(capability=(7, 5)))
    assert (status, found.endswith("H200 is older than compute capability 8.0")) == ("problem", True)
    assert '"device": "cpu"' in advice
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: NOTHING)
    status, found, advice = machine.gpu(card())
    assert (status, f"{NOTHING}/Python.h is missing" in found) == ("problem", True)
    assert f"python{installation.PYTHON}-dev" in advice
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert machine.gpu(card()) == (
        "ok",
        "H200 (9.0, 100.0 GiB of 139.0 GiB free); driver 580.1 for 1 GPU; CUDA 13.0",
        "",
    )
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.gpu(card())[2] == "pip install triton"


def test_the_cache_and_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.cache(tmp_path / "not/made/yet")[0] == "ok"
    assert not (tmp_path / "not").exists()
    assert machine.cache(Path("/proc/octavo")) == (
        "problem",
        "nothing can be written to /proc: No such file or directory",
        "set OCTAVO_CACHE to a folder that can be written",
    )
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20, total=2))
    assert machine.cache(tmp_path)[0] == "warning"
    full = SimpleNamespace(f_bavail=1, f_frsize=1 << 20)
    monkeypatch.setattr(preflight.os, "statvfs", lambda path: full)
    status, found, advice = machine.shared_memory(2, tmp_path)
    assert status == "problem"
    assert f"{tmp_path} has 1.0 MiB free, and the models need 32.0 MiB" in found
    assert "--shm-size=1g" in advice


def test_the_model_repository(tmp_path: Path) -> None:
    status, found, advice = machine.model_repository(tmp_path / "absent")
    assert (status, "is not a folder" in found, "--model-repository" in advice) == ("problem", True, True)
    toy = make_toy_repository(tmp_path / "toys")
    assert machine.model_repository(toy)[:2] == (
        "warning",
        f"{toy} holds no model that Octavo serves",
    )
    folder = tmp_path / "mine/llm"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "vllm"\n')
    (folder / "1/model.json").write_text('{"model": "x", "max_model_length": 3}')
    status, found, advice = machine.model_repository(tmp_path / "mine")
    assert (status, advice) == ("problem", f"correct it; all of it: octavo check {tmp_path / 'mine'}")
    assert found.startswith("llm: version 1: unknown engine argument 'max_model_length'")


def test_ports() -> None:
    (port,) = free_ports(1)
    assert outcome(doctor.port_check("http", port)) == ("ok", f"{port} is free", "")
    server = Server(lambda request, connection: connection.sendall(answer(b"hello", "404 Not Found")))
    try:
        taken = int(server.url.rsplit(":", 1)[1])
        for service in ("http", "metrics"):
            status, found, advice = outcome(doctor.port_check(service, taken))
            assert (status, found) == ("problem", f"{taken} cannot be used: Address already in use")
            assert advice.startswith(f"start with another one: octavo serve --{service}-port PORT")
        server.script = lambda request, connection: connection.sendall(answer(b"vllm:x 1\n"))
        for service, who in (("http", "a Triton server"), ("metrics", "a Triton server's metrics")):
            status, found, advice = outcome(doctor.port_check(service, taken))
            assert (status, found) == ("warning", f"{taken} is taken by {who}")
            assert "octavo doctor --url URL" in advice
    finally:
        server.close()


class Triton:
    """What a server says, and what is wrong with it."""

    def __init__(self) -> None:
        self.ready = True
        self.decoupled = True
        self.inputs = ["messages", "input_ids", "cancel_request_id"]
        self.metrics = 'octavo:ready{model="llm"} 1\n'
        self.answer = answer(b'{"text_output":"x","num_output_tokens":1,"num_input_tokens":1}')

    def __call__(self, request: Request, connection: socket.socket) -> None:
        path = request.line.split(" ")[1]
        if path.endswith("/ready"):
            connection.sendall(answer(b"", "200 OK" if self.ready else "400 Bad Request"))
        elif path == "/metrics":
            connection.sendall(answer(self.metrics.encode()))
        elif path.endswith("/config"):
            policy = {"decoupled": self.decoupled}
            config: dict[str, Any] = {"backend": "octavo", "model_transaction_policy": policy}
            connection.sendall(answer(json.dumps(config).encode()))
        elif request.line.startswith("GET"):
            inputs = [{"name": name, "datatype": "BYTES", "shape": [1]} for name in self.inputs]
            connection.sendall(
                answer(json.dumps({"name": "llm", "versions": ["1"], "inputs": inputs}).encode())
            )
        else:
            connection.sendall(self.answer)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Triton())
    yield server
    server.close()


def test_a_running_server(server: Server) -> None:
    triton = server.script
    assert isinstance(triton, Triton)
    checks = dict(doctor.server_checks(server.url, f"{server.url}/metrics", "llm"))

    def look(name: str) -> tuple[str, str, str]:
        return outcome((name, checks[name]))

    assert look("server") == ("ok", f"{server.url}: live, the model 'llm' is ready", "")
    assert look("model") == ("ok", "backend 'octavo', versions 1", "")
    assert look("answer") == ("ok", "1 token to 1", "")
    assert look("metrics") == ("ok", f"{server.url}/metrics: 1 series of the model's", "")
    triton.ready = False
    assert look("server")[1].endswith("is there, and the model 'llm' takes no requests")
    triton.inputs = ["text_input", "input_ids"]
    status, found, advice = look("model")
    assert (status, "has no messages, cancel_request_id" in found) == ("warning", True)
    assert "octavo serve --as vllm" in advice
    triton.decoupled = False
    assert look("model")[0] == "problem"
    triton.answer = answer(b'{"error":"[INTERNAL] broken"}', "500 Internal Server Error")
    assert look("answer") == ("problem", "[INTERNAL] broken", "look into the server's log")
    triton.metrics = 'octavo:ready{model="llm"} 0\n'
    assert look("metrics")[2] == "unload the model and load it again"
    triton.metrics = "nv_x 1\n"
    assert "REPORT_CUSTOM_METRICS" in look("metrics")[2]


def test_the_command_prints_lines_and_fails_with_a_problem(server: Server) -> None:
    command = [sys.executable, "-m", "octavo_client", "doctor", "--url", server.url]
    command += [
        "--metrics-url",
        f"{server.url}/metrics",
        "--model-repository",
        str(ROOT / "model_repository"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "ok       tritonserver       of nvidia-pytriton" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("0 problems, ")
    triton = server.script
    assert isinstance(triton, Triton)
    triton.answer = answer(b'{"error":"[INTERNAL] broken"}', "500 Internal Server Error")
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert found["problems"] == 1
    (problem,) = (check for check in found["checks"] if check["status"] == "problem")
    assert problem == {
        "check": "answer",
        "status": "problem",
        "found": "[INTERNAL] broken",
        "advice": "look into the server's log",
    }
