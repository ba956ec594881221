"""The `octavo` script as a user meets it: each test runs it as a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from ports import free_ports
from processes import children
from toy_repository import make_toy_repository

# `octavo` on a machine where the named modules are not installed.
WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Blocker())
from octavo_client.cli import main
main()
"""
SLOW = "import time\ntime.sleep(600)\n"
RAISES = 'raise ValueError("this model is broken")\n'


def octavo(*arguments: str, without: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT.format(blocked=without), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_commands() -> None:
    ran = octavo("--help")
    assert ran.returncode == 0
    assert "serve" in ran.stdout
    assert "Serve the models of a repository" in ran.stdout


def test_version() -> None:
    assert octavo("--version").stdout == f"octavo {version('octavo')}\n"


def test_serve_help_names_every_option() -> None:
    ran = octavo("serve", "--help")
    assert ran.returncode == 0
    for option in ("--model-repository", "--http-port", "--grpc-port", "--metrics-port", "--host", "--as"):
        assert option in ran.stdout
    for option in ("--tritonserver", "--exit-timeout", "--log-verbose", "--log-file", "--show-log"):
        assert option in ran.stdout


def test_an_unknown_command_is_an_error() -> None:
    ran = octavo("sevre")
    assert ran.returncode == 2
    assert "sevre" in ran.stderr


@pytest.mark.parametrize("missing", ["torch", "tokenizers", "safetensors", "gguf", "jinja2"])
def test_serve_of_a_base_install_names_the_extra(missing: str) -> None:
    ran = octavo("serve", "--http-port", "9000", without=(missing,))
    assert ran.returncode == 2
    assert ran.stderr == (
        f"error: octavo serve needs {missing}, which is not installed: pip install 'octavo[serve]'\n"
    )
    assert ran.stdout == ""


def test_a_base_install_still_lists_its_commands() -> None:
    ran = octavo("--help", without=("torch", "tokenizers", "gguf", "pytriton"))
    assert ran.returncode == 0
    assert "Not installed: pip install 'octavo[serve]'" in ran.stdout


def test_neither_the_script_nor_its_help_imports_what_is_slow() -> None:
    program = """
import sys
import octavo_client.cli
ours = [name for name in sys.modules if name.partition(".")[0] in ("octavo", "octavo_kernels", "torch")]
assert ours == [], ours
sys.argv = ["octavo", "serve", "--help"]
try:
    octavo_client.cli.main()
except SystemExit:
    pass
slow = {"torch", "numpy", "tokenizers", "gguf"} & set(sys.modules)
assert not slow, slow
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@contextmanager
def serving(repository: Path, cache: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`octavo serve` on free ports, with its output merged; killed should a test leave it running."""
    http, grpc, metrics = free_ports(3)
    command = [sys.executable, "-m", "octavo_client", "serve", "--model-repository", str(repository)]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command += ["--exit-timeout", "5", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OCTAVO_CACHE": str(cache)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", start: str) -> list[str]:
    """The lines of the output up to the first one that starts so."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    raise AssertionError(f"no line starts with {start!r}: {lines}")


def processes_that_mention(text: str) -> list[str]:
    """The command lines of running processes that name a path of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def shared_memory_of(process: "subprocess.Popen[str]") -> list[Path]:
    return list(Path("/dev/shm").glob(f"octavo-{process.pid}-*"))


def test_serve_prints_a_line_to_paste_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with serving(repository, tmp_path / "cache", "--as", "vllm") as process:
        lines = read_until(process, "curl ")
        assert lines[0] == "looking for a tritonserver"
        assert lines[1].startswith("starting tritonserver of nvidia-pytriton ")
        assert "loading the model 'toy'" in lines
        assert "the model 'toy' is loaded" in lines
        assert lines[-2].startswith("ready after ")
        answer = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, check=True).stdout
        assert '"text_output":"echo: The three primary colours are"' in answer
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert rest.splitlines()[-2:] == ["stopping the server", "stopped"]
        assert process.returncode == 0
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []


def test_serve_is_stopped_while_a_model_loads(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository", SLOW)
    with serving(repository, tmp_path / "cache") as process:
        read_until(process, "loading the model 'toy'")
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []


def test_serve_says_why_a_model_does_not_load(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository", RAISES)
    with serving(repository, tmp_path / "cache") as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert errors == ["error: the model 'toy' cannot be loaded: ValueError: this model is broken"]
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []


def test_serve_says_that_the_server_ended_by_itself(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with serving(repository, tmp_path / "cache", "--log-file", str(tmp_path / "log")) as process:
        read_until(process, "curl ")
        group = children(process.pid)[0]
        os.kill(group, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 1
    last = output.splitlines()[-1]
    assert last == f"error: tritonserver ended by itself with status -9; its log: {tmp_path / 'log'}"
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []


def test_serve_says_once_that_a_models_process_was_killed(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with serving(repository, tmp_path / "cache") as process:
        read_until(process, "curl ")
        server = children(process.pid)[0]
        model = children(server)[0]
        os.kill(model, signal.SIGKILL)
        said = read_until(process, "error: ")[-1]
        assert said.startswith(
            f"error: the process of model 'toy' (instance toy_0_0, process {model}) was killed by SIGKILL"
        )
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert "was killed by SIGKILL" not in rest
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []


def test_serve_shows_the_log_and_passes_options_on(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with serving(repository, tmp_path / "cache", "--show-log", "--", "--id=mine") as process:
        lines = read_until(process, "curl ")
        assert any("model_lifecycle.cc" in line and "loading: toy:1" in line for line in lines)
        assert any(line.split() == ["|", "server_id", "|", "mine", "|"] for line in lines)
        process.send_signal(signal.SIGHUP)
        rest, _ = process.communicate(timeout=30)
        assert "successfully unloaded 'toy' version 1" in rest
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-repository", "absent"], "error: the model repository absent is not a folder; name one"),
        (["--http-port", "9000", "--grpc-port", "9000"], "error: --http-port and --grpc-port are both 9000"),
    ],
)
def test_serve_refuses_with_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path)
    ran = octavo("serve", "--model-repository", str(repository), *arguments)
    assert ran.returncode == 1
    assert ran.stderr.startswith(words)
    assert ran.stderr.count("\n") == 1


def test_an_impatient_user_ends_a_server_that_hangs(tmp_path: Path) -> None:
    hangs = """
import time
class TritonPythonModel:
    def execute(self, requests):
        return None
    def finalize(self):
        time.sleep(600)
"""
    repository = make_toy_repository(tmp_path / "repository", hangs)
    with serving(repository, tmp_path / "cache", "--exit-timeout", "100") as process:
        read_until(process, "curl ")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 1
    assert output.splitlines()[-1].startswith("error: the server was ended before it had answered everything")
    assert processes_that_mention(str(repository)) == []
    assert shared_memory_of(process) == []
