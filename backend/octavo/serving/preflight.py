"""What this machine must have before anything else: a Python that the server can embed, a C compiler, and
room in shared memory.

Owns those checks and their wording. Called by `launcher` at every start, and but for the last one by the
Makefile before it installs anything: `python backend/octavo/serving/preflight.py`. It therefore imports the
standard library only, and nothing of ours. Each check returns None, or the one line to show.
"""

from __future__ import annotations  # so that an old Python gets as far as its error line

import ctypes
import os
import shutil
import sys
import sysconfig
from pathlib import Path

SUPPORTED_PYTHONS = ((3, 11), (3, 12))


def python_problem(version: tuple[int, int] = sys.version_info[:2]) -> str | None:
    if version in SUPPORTED_PYTHONS:
        return None
    known = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHONS)
    return (
        f"this is Python {version[0]}.{version[1]} ({sys.executable}); Octavo runs on Python {known}: "
        f"install one and name it, as in `make serve PYTHON=python{SUPPORTED_PYTHONS[-1][0]}."
        f"{SUPPORTED_PYTHONS[-1][1]}`"
    )


def libpython_name() -> str:
    return f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def libpython_folder() -> str | None:
    """The LIBDIR of this Python when its shared library is there; None where only the linker may find it."""
    folder = sysconfig.get_config_var("LIBDIR")
    return folder if folder and (Path(folder) / libpython_name()).exists() else None


def libpython_problem(name: str | None = None) -> str | None:
    """The server's Python backend embeds the interpreter, so it needs the shared libpython."""
    if name is None and libpython_folder() is not None:
        return None
    wanted = name or libpython_name()
    try:
        ctypes.CDLL(wanted)
    except OSError:
        package = wanted.removesuffix(".so.1.0")
        return (
            f"{wanted} is missing: the server embeds the Python at {sys.executable}, which came without its "
            f"shared library; install it (Debian and Ubuntu: `apt install {package}`) or use another Python"
        )
    return None


def compiler_problem(search_path: str | None = None) -> str | None:
    """Octavo builds its CPU kernels on the machine that runs them. `search_path` None means PATH."""
    if any(shutil.which(name, path=search_path) for name in ("cc", "gcc", "clang")):
        return None
    return (
        "no C compiler: none of cc, gcc and clang is on PATH, and the CPU kernels are built with it; "
        "install one (Debian and Ubuntu: `apt install gcc libc6-dev`)"
    )


def shared_memory_problem(num_models: int, region_bytes: int, folder: Path) -> str | None:
    """Each model instance begins with a region of so many bytes in `folder`, /dev/shm, and may need more."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return (
            f"{folder} cannot be used: {error.strerror}; the server talks to its models through shared "
            "memory there, so mount a tmpfs on it"
        )
    free_bytes, needed_bytes = found.f_bavail * found.f_frsize, num_models * region_bytes
    if free_bytes >= needed_bytes:
        return None
    return (
        f"{folder} has {free_bytes / 2**20:.1f} MiB free, and the models need {needed_bytes / 2**20:.1f} MiB "
        f"of shared memory there to start with ({num_models} x {region_bytes / 2**20:g}): make it larger "
        "(docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory; else `mount -o remount,size=1g "
        f"{folder}`), or start with less: octavo serve ... -- "
        f"--backend-config=python,shm-default-byte-size={1 << 20}"
    )


def main() -> int:
    problems = [problem for problem in (python_problem(), libpython_problem(), compiler_problem()) if problem]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
