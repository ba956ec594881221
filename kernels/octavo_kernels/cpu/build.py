"""Compiles the C kernels, one shared object for each instruction set, into a cache that outlives the process.

Used by `library` at a process's first kernel, and by `octavo build-kernels`, which compiles all instruction
sets ahead for a machine that has no compiler or cannot write. Free of torch.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = (
    "-std=gnu11 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast "
    "-Wall -Wextra -Wno-psabi -pthread"
).split()
_AVX512 = (
    "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni -mfma -mbmi2 "
    "-mprefer-vector-width=512"
).split()
_AVX512_CPU = frozenset("avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni fma bmi2".split())
# What each instruction set needs of the compiler, and of the CPU (as /proc/cpuinfo spells it). Best first.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512": tuple(_AVX512),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
}
CPU_FLAGS: Mapping[str, frozenset[str]] = {
    "amx": _AVX512_CPU | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512_CPU,
    "avx2": frozenset("avx2 fma f16c bmi2".split()),
}
_LONGEST_COMPILATION_S = 300


class BuildError(Exception):
    """No shared object could be had; the text says why and what to do."""


def cache_folder(root: Path | None = None) -> Path:
    """kernels/ under `root` or $OCTAVO_CACHE, else octavo/kernels/ under $XDG_CACHE_HOME or ~/.cache. It may
    not exist yet."""
    if own := root or os.environ.get("OCTAVO_CACHE"):
        return Path(own) / "kernels"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise BuildError(f"no folder to cache in: {error}; set OCTAVO_CACHE to one") from error
    return Path(base) / "octavo/kernels"


def build(name: str, folder: Path | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """The shared object of instruction set `name` in `folder` (the cache when None), compiled if it is not
    there yet. Its name holds a digest of the sources and flags, and one of the compiler; without a compiler,
    anyone's of the same sources and flags will do. Raises `BuildError`.

    `extra_flags` are for tests: `-DOCTAVO_EMULATE_AMX` with avx512 makes the kernels of amx for a CPU
    without it.

    Compiled beside its place and renamed into it, so that processes that start at once do not collide.
    """
    folder = cache_folder() if folder is None else folder
    arguments = [*COMMON_FLAGS, *FLAGS[name], *extra_flags]
    sources = sorted(SOURCES.glob("*.c"))
    stem = _stem(name, arguments)
    try:
        compiler = _compiler()
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        ready = sorted(folder.glob(f"{stem}-*.so"))
        if ready:
            return ready[0]
        if isinstance(error, BuildError):
            raise
        raise BuildError(f"the C compiler does not run: {error}; set CC to one that does") from error
    target = folder / f"{stem}-{_digest(shlex.join(compiler).encode(), version)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            new = Path(scratch) / "kernels.so"
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
            commands = [
                [*compiler, *arguments, "-c", "-o", str(to), str(source)]
                for source, to in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            _run([*compiler, *arguments, "-shared", "-o", str(new), *map(str, objects), "-lm"])
            new.replace(target)
    except OSError as error:
        raise BuildError(
            f"nothing can be written under {folder}: {error.strerror}; set OCTAVO_CACHE to a folder that can"
        ) from error
    return target


def compiled_ahead(folder: Path | None = None) -> bool:
    """Whether every instruction set of these sources lies in `folder` (the cache when None), so that no
    compiler is needed. Raises `BuildError` where there is no folder to cache in."""
    folder = cache_folder() if folder is None else folder
    return all(
        any(folder.glob(f"{_stem(name, [*COMMON_FLAGS, *flags])}-*.so")) for name, flags in FLAGS.items()
    )


def _stem(name: str, arguments: Sequence[str]) -> str:
    """What a shared object's name begins with: the instruction set, and a digest of sources and flags."""
    made_from = [" ".join(arguments).encode()]
    made_from += [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return f"{name}-{_digest(*made_from)}"


def _run(command: Sequence[str]) -> None:
    """Raises `BuildError` with the compiler's first complaint."""
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",  # of its quotation marks, whatever this process's own encoding is
            errors="replace",
            timeout=_LONGEST_COMPILATION_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_LONGEST_COMPILATION_S} s") from error
    if ran.returncode:
        said = next((line for line in ran.stderr.splitlines() if "error" in line.lower()), ran.stderr)
        raise BuildError(f"{command[0]} failed ({ran.returncode}): {said.strip()}")


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or shutil.which(command[0]) is None:
        raise BuildError(f"there is no C compiler '{' '.join(command)}'; install one, or set CC")
    return command


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
