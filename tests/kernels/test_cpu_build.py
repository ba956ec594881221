"""Compiling the native kernels: the cache, machines without a compiler, processes that start at once."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_kernels.cpu import build, library


def build_kernels(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-m", "octavo_client", "build-kernels", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every instruction set, compiled ahead as one does for an image: what OCTAVO_CACHE is set to."""
    folder = tmp_path_factory.mktemp("ahead")
    ran = build_kernels(str(folder))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [Path(line).name.split("-")[0] for line in ran.stdout.split()] == list(build.FLAGS)
    return folder


@pytest.fixture(autouse=True)
def own_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OCTAVO_KERNELS", raising=False)
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_every_instruction_set_is_a_shared_object(built: Path) -> None:
    for name in build.FLAGS:
        path = build.build(name, built / "kernels")
        assert path.read_bytes()[:4] == b"\x7fELF"
        if name in library.supported():
            assert library.load(path).octavo_rms_norm is not None


def test_what_is_there_is_not_compiled_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in (built / "kernels").iterdir()}
    monkeypatch.setenv("OCTAVO_CACHE", str(built))
    for name in build.FLAGS:
        assert build.build(name) in before
    assert {path: path.stat().st_mtime_ns for path in (built / "kernels").iterdir()} == before


def test_a_machine_without_a_compiler_takes_what_was_compiled_ahead(built: Path) -> None:
    """Nor can it write: as in a container with a read-only root."""
    program = "from octavo_kernels.cpu import library; print(library.library()._name)"
    environment = {**os.environ, "OCTAVO_CACHE": str(built), "CC": "/nonexistent"}
    before = sorted(built.rglob("*"))
    for folder in (built, built / "kernels"):
        folder.chmod(0o555)
    try:
        command = [sys.executable, "-W", "error", "-c", program]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    finally:
        for folder in (built, built / "kernels"):
            folder.chmod(0o755)
    assert (ran.returncode, ran.stderr) == (0, "")  # a warning would be there
    assert Path(ran.stdout.strip()) in before
    assert sorted(built.rglob("*")) == before


def test_building_ahead_without_a_compiler_is_an_error(tmp_path: Path) -> None:
    ran = build_kernels(str(tmp_path / "new"), CC="/nonexistent")
    assert ran.returncode == 1
    assert ran.stderr == "error: there is no C compiler '/nonexistent'; install one, or set CC\n"
    assert ran.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_building_ahead_into_the_cache(built: Path) -> None:
    ran = build_kernels(OCTAVO_CACHE=str(built), CC="/nonexistent")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {Path(line) for line in ran.stdout.split()} == set((built / "kernels").iterdir())


def test_where_amx_is_refused_the_next_best_serves(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "refusing.c").write_text("long octavo_start(void) { return 1; }\n")
    refusing = tmp_path / "refusing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", refusing, tmp_path / "refusing.c"], check=True)
    others = [name for name in library.supported() if name != "amx"]
    monkeypatch.setattr(library, "supported", lambda: ["amx", *others])
    ready = {name: build.build(name, built / "kernels") for name in others}
    monkeypatch.setattr(build, "build", lambda name: {**ready, "amx": refusing}[name])
    with caplog.at_level(logging.WARNING, "octavo"):
        assert library.library() is not None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"CPU kernels: {others[0]}; better ones could not be had: "
        "the system does not let this process use AMX (Operation not permitted)"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no C compiler 'no-such-compiler'; install one, or set CC"),
        ('[ "$1" = --version ] && exit 0; echo "x.c:1: error: no such thing" >&2; exit 3', "no such thing"),
        ("exit 4", "the C compiler does not run"),
        (
            '[ "$1" = --version ] && exit 0; while [ "$1" != -o ]; do shift; done; echo garbage > "$2"',
            "kernels",
        ),
    ],
    ids=["missing", "failing", "broken", "writing garbage"],
)
def test_without_kernels_one_line_says_why_and_the_reference_serves(
    script: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = "no-such-compiler" if script is None else fake_compiler(tmp_path, script)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "octavo"):
        assert library.library() is None
        assert library.library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("CPU kernels run as the slow torch reference: ")
    assert reason in record.getMessage()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"nothing can be written under .*set OCTAVO_CACHE"):
        build.build("avx2")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_folder() == Path("/x/octavo/kernels")
    monkeypatch.setenv("OCTAVO_CACHE", "/y")
    assert build.cache_folder() == Path("/y/kernels")


def test_an_instruction_set_that_this_cpu_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_KERNELS", "sse9")
    assert library.library() is None
    assert "OCTAVO_KERNELS is 'sse9'; on this CPU it may be: reference" in caplog.text


def test_the_reference_is_taken_silently_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    assert library.library() is None
    assert caplog.text == ""


def test_two_processes_that_compile_at_once(built: Path, tmp_path: Path) -> None:
    """With a compiler that takes long enough for both to be at it, and writes piece by piece."""
    name = library.supported()[0]
    ready = build.build(name, built / "kernels")
    halves = f'head -c 9999 {ready} > "$2"; sleep 0.5; tail -c +10000 {ready} >> "$2"'
    compiler = fake_compiler(
        tmp_path, f'[ "$1" = --version ] && exit 0; while [ "$1" != -o ]; do shift; done; {halves}'
    )
    program = f"import ctypes; from octavo_kernels.cpu import build; ctypes.CDLL(build.build('{name}'))"
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path / "cache"), "CC": compiler}
    running = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    (made,) = (tmp_path / "cache/kernels").iterdir()  # nothing half made is left
    assert made.read_bytes() == ready.read_bytes()


@pytest.mark.parametrize("name", build.FLAGS)
def test_every_instruction_set_compiles_without_a_warning(name: str) -> None:
    flags = [*build.COMMON_FLAGS, *build.FLAGS[name], "-Werror", "-fsyntax-only"]
    ran = subprocess.run(
        ["cc", *flags, *map(str, build.SOURCES.glob("*.c"))], capture_output=True, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
