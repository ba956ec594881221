"""What `pip install octavo` gives, without any extra: a client that works, commands that say what is missing.

The wheel is built and installed into an environment of its own, beside nothing but what its base dependencies
come to. These are linked from the environment that runs the tests, so that no network is needed.
"""

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripted_http import CHUNKED, Server, chunk, event, sends

ROOT = Path(__file__).parents[2]
EXTRAS = ("torch", "tokenizers", "gguf", "jinja2", "pytriton", "fastapi", "uvicorn", "locust", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    build += ["--disable-pip-version-check", "-w", str(folder), str(ROOT)]
    ran = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    (found,) = folder.glob("octavo-*.whl")
    return found


def closure(names: list[Requirement]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that requirements come to, extras as asked for, with what those require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        distribution = importlib.metadata.distribution(requirement.name)
        found[requirement.name.lower()] = distribution
        for extra in ("", *requirement.extras):
            for line in distribution.requires or ():
                wanted = Requirement(line)
                if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                    waiting.append(wanted)
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the base install."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    ran = subprocess.run(
        [*install, "--disable-pip-version-check", str(wheel)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("octavo-*.dist-info")
    base = [Requirement(line) for line in importlib.metadata.PathDistribution(metadata).requires or ()]
    for distribution in closure([one for one in base if one.marker is None]).values():
        for file in distribution.files or ():
            top = file.parts[0]
            target = Path(str(distribution.locate_file(top)))
            if top != ".." and target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    return python


def run(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=python.parent,  # where no source of ours lies
        env={**environment, "COLUMNS": "200"},
    )


def test_the_wheel_holds_each_package_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("octavo", "octavo_kernels", "octavo_client", "octavo_gateway"):
        (source,) = (path for path in ROOT.glob(f"*/{package}") if path.is_dir())
        files = {
            str(path.relative_to(source.parent))
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert f"{package}/py.typed" in names
        assert files - names == set()  # typed marks, C sources and the gateway's page among them


def test_nothing_of_the_extras_is_there(python: Path) -> None:
    program = (
        "import importlib.util as u, octavo_client, octavo\n"
        f"print([n for n in {EXTRAS!r} if u.find_spec(n)], octavo_client.__file__)"
    )
    ran = run(python, "-c", program)
    assert ran.stderr == ""
    found, file = ran.stdout.split("] ")
    assert found == "["
    assert str(python.parents[1]) in file


def test_the_client_works(python: Path) -> None:
    program = """
import sys
from octavo_client import AsyncClient, Client
with Client(sys.argv[1]) as client, client.stream("Say") as stream:
    print("".join(delta.text for delta in stream))
Client("grpc://localhost:1").close()
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    server = Server(
        sends(CHUNKED, chunk(event(text_output="Hel")), chunk(event(text_output="lo")), chunk(b""))
    )
    try:
        ran = run(python, "-c", program, server.url)
        assert (ran.stdout.split("\n")[0], ran.stderr) == ("Hello", "")
        assert ran.stdout.split("\n")[1].startswith("False")
        asked = run(python, "-m", "octavo_client", "generate", "Say", "--url", server.url)
        assert (asked.stdout, asked.stderr, asked.returncode) == ("Hello\n", "", 0)
    finally:
        server.close()


def test_commands_say_which_extra_is_missing(python: Path) -> None:
    octavo = [str(python.parent / "octavo")]
    helped = run(python, *octavo, "--help")
    assert helped.returncode == 0, helped.stderr
    for command in ("bench", "chat", "doctor", "generate", "serve", "top"):
        assert f" {command} " in helped.stdout
    for command in ("bench", "chat", "doctor", "generate", "top"):
        assert run(python, *octavo, command, "--help").returncode == 0
    served = run(python, *octavo, "serve")
    assert served.returncode == 2
    assert served.stderr == (
        "error: octavo serve needs torch, which is not installed: pip install 'octavo[serve]'\n"
    )


def test_doctor_says_that_the_server_part_is_not_installed(python: Path) -> None:
    ran = run(python, "-m", "octavo_client", "doctor", "--url", "http://127.0.0.1:9")
    assert ran.returncode == 1  # nobody answers there
    assert (
        "warning  serve              not installed: there is no torch; clients work without it" in ran.stdout
    )
    assert "-> to serve models on this machine: pip install 'octavo[serve]'" in ran.stdout
    assert "problem  server             no server answers at http://127.0.0.1:9" in ran.stdout
