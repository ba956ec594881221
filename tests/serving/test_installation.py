"""Which tritonserver is taken, what is assembled for it, and what a machine lacks."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import LaunchError
from octavo.serving import installation, preflight

STUB = "python/triton_python_backend_stub"
ABSENT = Path("/nonexistent")


def installed_server(root: Path, python: str = installation.PYTHON) -> Path:
    """What an NVIDIA container has in /opt/tritonserver, as far as a launcher looks at it."""
    for folder in ("bin", "lib", "caches", "repoagents", "backends/python", "backends/vllm", "backends/onnx"):
        (root / folder).mkdir(parents=True)
    (root / "bin/tritonserver").write_text("")
    (root / "TRITON_VERSION").write_text("2.60.0\n")
    (root / "backends" / STUB).write_bytes(b"\x7fELF..\0libpython" + python.encode() + b".so.1.0\0")
    return root


def test_an_installed_server_comes_first(tmp_path: Path) -> None:
    root = installed_server(tmp_path / "server")
    found = installation.find(root)
    assert found.executable == root / "bin/tritonserver"
    assert (found.stub, found.note, found.version) == (None, None, "2.60.0")
    assert sorted(found.backends) == ["onnx", "python", "vllm"]
    assert (found.cache_folder, found.repoagent_folder) == (root / "caches", root / "repoagents")


def test_an_installed_server_for_another_python_is_passed_over_with_a_word(tmp_path: Path) -> None:
    found = installation.find(installed_server(tmp_path, "3.10"))
    assert found.executable.parts[-4:] == ("pytriton", "tritonserver", "bin", "tritonserver")
    assert found.note == (
        f"the Python backend stub of {tmp_path} is built for Python 3.10 and this is Python "
        f"{installation.PYTHON}: using the nvidia-pytriton package instead"
    )


def test_no_server_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError, match=r"there is none at /nonexistent, and .*pip install 'octavo\[serve\]'"
    ):
        installation.find(ABSENT)
    with pytest.raises(LaunchError, match=r"is built for Python 3\.10 and this is .*--tritonserver"):
        installation.find(installed_server(tmp_path, "3.10"))


def test_numpy_2_beside_the_numpy_1_stub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.numpy_problem("1.26.4") is None
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.4.1" if name == "numpy" else version(name)
    )
    with pytest.raises(LaunchError, match=r"^numpy 2\.4\.1 is installed, and .* pip install 'numpy<2'$"):
        installation.find(ABSENT)


def test_an_installed_server_may_have_numpy_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.1")
    assert installation.find(installed_server(tmp_path)).version == "2.60.0"


def test_a_python_that_the_wheel_has_no_stub_for_is_told_which_ones_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installation, "PYTHON", "3.99")
    with pytest.raises(LaunchError, match=r"no stub for Python 3\.99; it has them for 3\.8, .*3\.11, 3\.12"):
        installation.find(ABSENT)


def test_a_missing_libpython_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = preflight.libpython_problem("libpython3.99.so.1.0")
    assert problem is not None
    assert problem.startswith("libpython3.99.so.1.0 is missing: the server embeds the Python at ")
    assert "`apt install libpython3.99`" in problem
    monkeypatch.setattr(preflight, "libpython_problem", lambda: problem)
    with pytest.raises(LaunchError, match=r"libpython3\.99\.so\.1\.0 is missing"):
        installation.find(ABSENT)


def test_an_unsupported_python_is_named() -> None:
    assert preflight.python_problem((3, 11)) is None
    assert preflight.python_problem((3, 12)) is None
    problem = preflight.python_problem((3, 13))
    assert problem is not None
    assert "Octavo runs on Python 3.11 or 3.12" in problem
    assert "make serve PYTHON=python3.12" in problem


def test_preflight_runs_by_itself_before_anything_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-IS", str(preflight.__file__)]
    ok = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ok.returncode, ok.stderr) == (0, "")
    bare = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert bare.returncode == 1
    assert bare.stderr.startswith("error: no C compiler")
    assert bare.stderr.count("\n") == 1


def test_the_wheels_backends_are_copied_with_the_stub_of_this_python(tmp_path: Path) -> None:
    server = installation.find(ABSENT)
    assert server.stub is not None
    backends = installation.assemble_backends(server, ["octavo", "vllm"], tmp_path)
    assert sorted(path.name for path in backends.iterdir()) == ["octavo", "python", "vllm"]
    assert (backends / STUB).read_bytes() == server.stub.read_bytes()
    assert os.access(backends / STUB, os.X_OK)
    assert (backends / "python/libtriton_python.so").exists()
    assert (backends / "vllm/model.py").read_text() == installation.BACKEND_MODEL
    assert not (server.backends["python"] / "triton_python_backend_stub").exists(), (
        "site-packages was written"
    )
    assert installation.assemble_backends(server, ["vllm", "octavo"], tmp_path) == backends
    assert installation.assemble_backends(server, ["octavo"], tmp_path) != backends


def test_the_installed_servers_backends_are_linked_but_for_those_that_octavo_takes(tmp_path: Path) -> None:
    root = installed_server(tmp_path / "server")
    backends = installation.assemble_backends(installation.find(root), ["octavo", "vllm"], tmp_path)
    assert sorted(path.name for path in backends.iterdir()) == ["octavo", "onnx", "python", "vllm"]
    assert (backends / "onnx").resolve() == root / "backends/onnx"
    assert (backends / STUB).resolve() == root / "backends" / STUB
    assert not (backends / "vllm").is_symlink()
    assert list((root / "backends/vllm").iterdir()) == []


def test_servers_that_start_at_once_share_one_folder(tmp_path: Path) -> None:
    server = installation.find(ABSENT)
    found: list[Path] = []
    together = threading.Barrier(8)

    def assemble() -> None:
        together.wait()
        found.append(installation.assemble_backends(server, ["octavo"], tmp_path))

    threads = [threading.Thread(target=assemble) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert [path.name for path in (tmp_path / "backends").iterdir()] == [found[0].name], "scratch is left"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be laid out under .*file.* set OCTAVO_CACHE"):
        installation.assemble_backends(installation.find(ABSENT), ["octavo"], tmp_path / "file")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OCTAVO_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/octavo"),
        ({"HOME": "/c"}, "/c/.cache/octavo"),
    ],
)
def test_where_the_cache_is(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OCTAVO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert installation.cache_root() == Path(expected)


def environment(**base: str) -> dict[str, str]:
    server: Any = installation.Installation(Path("s"), {}, None, (Path("/libs"),), None, None, "1")
    return installation.environment(server, base)


def test_the_environment_leads_the_stub_to_this_python() -> None:
    changed = environment(PATH="/bin", LD_LIBRARY_PATH="/mine", LANG="C")
    assert changed["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert changed["LD_LIBRARY_PATH"].startswith("/libs:")
    assert changed["LD_LIBRARY_PATH"].endswith(":/mine")
    assert changed["LANG"] == "C"
    assert "PYTHONHOME" not in changed


def test_a_python_under_another_name_is_led_to_by_pythonhome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.11-custom"))
    changed = environment(PATH="/bin")
    assert changed["PYTHONHOME"] == f"{sys.base_prefix}:{sys.base_exec_prefix}"
    assert str(Path(installation.__file__).parents[2]) in changed["PYTHONPATH"].split(":")
