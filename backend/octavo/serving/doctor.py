"""What `octavo doctor` checks of a machine that is to serve: one function for each line that it prints.

Found by an entry point in the group `octavo.doctor`, whose form `octavo_client.doctor` describes. What is
known here comes from the code that serves: `preflight`, `installation`, `repository`, the kernels' own build.
Importing it fails with `ModuleNotFoundError` where the `serve` extra is not installed.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.serving import installation, preflight
from octavo.serving.launcher import SHARED_MEMORY, SHM_BYTES
from octavo.serving.repository import read_repository
from octavo.worker.cores import usable_cores
from octavo.worker.memory import available_bytes, readable
from octavo_kernels.cpu import build

installation.require_extra()

Outcome = tuple[str, str, str]  # status, what was found, what to do
Check = tuple[str, Callable[[], Outcome]]

_LEAST_CACHE_BYTES = 1 << 30  # kernels, backends and logs take some MiB; a log of debugging may grow
_LEAST_MEMORY_BYTES = 2 << 30
_LONGEST_S = 20.0


def checks(repository: Path | None) -> list[Check]:
    """`repository` None: no model repository is looked at."""
    found: list[Check] = [
        ("libpython", libpython),
        ("compiler", compiler),
        ("tritonserver", tritonserver),
        ("torch", torch_on_cpu),
        ("CPU", cpu),
        ("memory", memory),
        ("GPU", gpu),
        ("cache", lambda: cache(installation.cache_root())),
        ("shared memory", lambda: shared_memory(_num_models(repository), SHARED_MEMORY)),
    ]
    if repository is not None:
        found.append(("model repository", lambda: model_repository(repository)))
    return found


def libpython() -> Outcome:
    problem = preflight.libpython_problem()
    return ("problem", *_parts(problem)) if problem else ("ok", preflight.libpython_name(), "")


def compiler() -> Outcome:
    """One that is on PATH and compiles; none is needed where all kernels have been built ahead."""
    if build.compiled_ahead():
        return "ok", f"not needed: the kernels of {build.cache_folder()} were built ahead", ""
    problem = preflight.compiler_problem()
    if problem:
        return ("problem", *_parts(problem))
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.c"
        source.write_text("#include <math.h>\n#include <pthread.h>\nint probe(void) { return 0; }\n")
        command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC"]
        try:
            ran = subprocess.run(
                [*command, "-o", f"{scratch}/probe.so", str(source)],
                capture_output=True,
                text=True,
                timeout=_LONGEST_S,
                check=False,
            )
            said = ran.stderr.strip().partition("\n")[0] if ran.returncode else None
        except OSError as error:
            said = error.strerror or str(error)
    if said is not None:
        return (
            "problem",
            f"the C compiler '{command[0]}' does not work: {said}",
            "install one with the C library's headers (Debian and Ubuntu: `apt install gcc libc6-dev`), "
            "or set CC to one that works",
        )
    return "ok", shutil.which(command[0]) or command[0], ""


def tritonserver() -> Outcome:
    """Finds one as `octavo serve` does, lays its backends out, and starts it until it has its libraries."""
    try:
        server = installation.find()
        with tempfile.TemporaryDirectory() as scratch:
            installation.assemble_backends(server, ["octavo"], Path(scratch))
    except OctavoError as error:
        return ("problem", *_parts(str(error)))
    ran = subprocess.run(
        [server.executable, "--help"],
        env=installation.environment(server),
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    if "--model-repository" not in ran.stdout + ran.stderr:
        said = next(iter((ran.stderr or ran.stdout).strip().splitlines()), f"status {ran.returncode}")
        return (
            "problem",
            f"{server.executable} does not start: {said}",
            "reinstall it (pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0), or install the "
            "library that it names",
        )
    found = f"{server.version} with numpy {importlib.metadata.version('numpy')}"
    if server.note:
        return "warning", f"{found}; {server.note}", "use the Python that the installed server's stub is for"
    return "ok", found, ""


def torch_on_cpu() -> Outcome:
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    found = f"{torch.__version__}, CPU level {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
    if threads > cores:
        return (
            "warning",
            f"{found}, and this process may use {cores} cores",
            f"nothing for Octavo, which takes {cores}; other torch programs here: OMP_NUM_THREADS={cores}",
        )
    return "ok", found, ""


def cpu() -> Outcome:
    """The best instruction set of ours that this processor has."""
    from octavo_kernels.cpu.library import supported

    names = supported()
    found = f"{usable_cores()} usable cores"
    if not names:
        return (
            "warning",
            f"{found}, without AVX2, FMA and F16C",
            "the CPU kernels run as the slow torch reference: use a processor of 2014 or newer, or a GPU",
        )
    return "ok", f"{found}, kernels for {names[0]}", ""


def memory() -> Outcome:
    free = available_bytes()
    if free < _LEAST_MEMORY_BYTES:
        return (
            "warning",
            f"{readable(free)} free",
            "a model needs its weights and a KV cache (a quarter of what is free): end other programs, or "
            "raise this container's limit",
        )
    return "ok", f"{readable(free)} free", ""


def gpu(torch: Any = None) -> Outcome:
    """By torch and by nvidia-smi, which tell different faults. `torch`: the module where it is None."""
    torch = torch or importlib.import_module("torch")
    driver = _driver()
    if not torch.cuda.is_available():
        if driver is None:
            return "ok", "none; Octavo computes on the CPU", ""
        if torch.version.cuda is None:
            return (
                "warning",
                f"{driver}, and torch {torch.__version__} is a build without CUDA",
                "to use the GPU install a CUDA build of torch",
            )
        return (
            "problem",
            f"{driver}, and torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it",
            "update the driver to one that knows this CUDA; in a container start it with --gpus all",
        )
    from octavo_kernels.gpu import LEAST_CAPABILITY

    names, old = [], []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)} ({capability[0]}.{capability[1]}"
        names.append(f"{name}, {readable(free)} of {readable(total)} free)")
        if capability < LEAST_CAPABILITY:
            old.append(torch.cuda.get_device_name(index))
    found = f"{', '.join(names)}; {driver or 'no nvidia-smi'}; CUDA {torch.version.cuda}"
    if old:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return (
            "problem",
            f"{found}: {', '.join(old)} is older than compute capability {least}",
            'use a newer GPU, or "device": "cpu" in model.json',
        )
    if importlib.util.find_spec("triton") is None:
        return (
            "problem",
            f"{found}; the GPU kernels need triton, which is not installed",
            "pip install triton",
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        return (
            "problem",
            f"{found}; {headers} is missing, and triton builds its launchers with it",
            f"install Python's headers (Debian: `apt install python{installation.PYTHON}-dev`)",
        )
    return "ok", found, ""


def _driver() -> str | None:
    """What nvidia-smi says; None where there is none, or no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ran.stdout.strip().splitlines()
    return f"driver {lines[0].split(',')[0]} for {len(lines)} GPU" if lines else None


def cache(root: Path) -> Outcome:
    """Whether kernels, backends and logs can be kept. Writes and removes one file, makes no folder."""
    folder = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return (
            "problem",
            f"nothing can be written to {folder}: {error.strerror}",
            "set OCTAVO_CACHE to a folder that can be written",
        )
    free = shutil.disk_usage(folder).free
    if free < _LEAST_CACHE_BYTES:
        return "warning", f"{root}: {readable(free)} free", "make room, or set OCTAVO_CACHE to another disk"
    return "ok", f"{root}: {readable(free)} free", ""


def shared_memory(num_models: int, folder: Path) -> Outcome:
    problem = preflight.shared_memory_problem(num_models, SHM_BYTES, folder)
    if problem:
        return ("problem", *_parts(problem))
    usage = shutil.disk_usage(folder)
    return "ok", f"{folder}: {readable(usage.free)} of {readable(usage.total)} free", ""


def model_repository(repository: Path) -> Outcome:
    """What `octavo check` says, in short."""
    try:
        reports = read_repository(repository)
    except OctavoError as error:
        return ("problem", *_parts(str(error)))
    errors = [f"{report.name}: {error}" for report in reports for error in report.all_errors()]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return "problem", errors[0] + more, f"correct it; all of it: octavo check {repository}"
    ours = [report.name for report in reports if report.ours]
    if not ours:
        return (
            "warning",
            f"{repository} holds no model that Octavo serves",
            'name the backend "octavo" or "vllm" in its config.pbtxt, or copy model_repository/llm',
        )
    return "ok", f"{repository}: {', '.join(ours)} would load", ""


def _num_models(repository: Path | None) -> int:
    """At least one: that is what will be served."""
    if repository is None or not repository.is_dir():
        return 1
    return max(1, sum(path.is_dir() and path.name[0] != "." for path in repository.iterdir()))


def _parts(problem: str) -> tuple[str, str]:
    """What was found and what to do, of a line that says both."""
    cuts = [problem.find(mark) for mark in ("; ", ": pip ", ": make it larger") if mark in problem]
    if not cuts:
        return problem, "see backend/docs/troubleshooting.md"
    return problem[: min(cuts)], problem[min(cuts) + 2 :]
