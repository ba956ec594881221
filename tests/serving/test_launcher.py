"""Starting and stopping a real tritonserver on models that need no engine, and each reason not to start."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import LaunchError
from octavo.serving import installation, launcher, preflight
from octavo.serving.launcher import LaunchOptions, RunningServer
from octavo_kernels.cpu import build
from processes import group_is_empty, launch_options, regions
from toy_repository import ECHO, make_toy_repository

READY_TIMEOUT_S = 60.0


def options_for(repository: Path, **options: Any) -> LaunchOptions:
    return launch_options(repository, **{"exit_timeout_s": 5, **options})


def start(repository: Path, log_path: Path, **options: Any) -> RunningServer:
    return RunningServer.start(options_for(repository, **options), installation.find(), log_path)


def test_a_model_is_served_and_nothing_is_left_when_it_is_stopped(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with start(repository, tmp_path / "log") as server:
        server.wait_ready(READY_TIMEOUT_S)
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/toy/generate", data=b'{"text_input": "hello"}'
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["text_output"] == "echo: hello"
        assert regions(server)
        executable = f"toy: {Path(sys.executable).parent / 'python3'}"
        assert executable in {line.text for line in server.log.new_lines()}, "the stub is another Python"
    assert server.process.returncode == 0
    assert server.stop() == 0, "stopping twice"
    assert group_is_empty(server.process.pid)
    assert not regions(server)


def test_a_server_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    options = options_for(repository)
    program = f"""
        import time
        from pathlib import Path
        from octavo.serving import installation
        from octavo.serving.launcher import LaunchOptions, RunningServer
        server = RunningServer.start(
            LaunchOptions(Path({str(repository)!r}), http_port={options.http_port},
                          grpc_port={options.grpc_port}, metrics_port={options.metrics_port}),
            installation.find(), Path({str(tmp_path / "log")!r}))
        server.wait_ready()
        print(server.process.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        group = int(started.stdout.readline())
        started.kill()
    deadline = time.monotonic() + 15
    while not group_is_empty(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_is_empty(group)


def test_a_hanging_model_is_killed_after_the_deadline(tmp_path: Path) -> None:
    hangs = """
        import signal, time
        class TritonPythonModel:
            def initialize(self, args):
                pass
            def execute(self, requests):
                return None
            def finalize(self):
                time.sleep(600)
    """
    repository = make_toy_repository(tmp_path / "repository", textwrap.dedent(hangs))
    with start(repository, tmp_path / "log", exit_timeout_s=1) as server:
        server.wait_ready(READY_TIMEOUT_S)
        asked = time.monotonic()
        server.stop()
        assert time.monotonic() - asked < 1 + launcher._KILL_GRACE_S + 2
    assert group_is_empty(server.process.pid)
    assert not regions(server)


def test_a_server_that_still_loads_is_stopped_at_once(tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(600)\n"
    with start(make_toy_repository(tmp_path / "repository", slow), tmp_path / "log") as server:
        time.sleep(1)
        asked = time.monotonic()
        assert server.stop() in (-signal.SIGTERM, -signal.SIGKILL)
        assert time.monotonic() - asked < 4
    assert group_is_empty(server.process.pid)
    assert not regions(server)


RAISES = """
from octavo.errors import ConfigError
class TritonPythonModel:
    def initialize(self, args):
        raise ConfigError("unknown engine argument 'blok_size'; did you mean 'block_size'?")
"""


def test_a_server_that_does_not_take_models_which_are_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As was seen of the 24.10 server on a machine with far too much to do."""
    says_so = 'pb_utils.Logger.log_info("toy_0_0: version 1 is ready")'
    model = ECHO.replace("def execute", f"    {says_so}\n        time.sleep(60)\n\n    def execute")
    repository = make_toy_repository(tmp_path / "repository", f"import time\n{model}")
    monkeypatch.setattr(launcher, "_HANGS_S", 2.0)
    with (
        start(repository, tmp_path / "log") as server,
        pytest.raises(LaunchError, match=r"the server hangs: .* for 2 s .*; its log: .*/log"),
    ):
        server.wait_ready(READY_TIMEOUT_S)
    assert group_is_empty(server.process.pid)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            RAISES,
            "the model 'toy' cannot be loaded: unknown engine argument 'blok_size'; did you mean 'block_",
        ),
        (
            "import nothing_here",
            "the model 'toy' cannot be loaded: ModuleNotFoundError: No module named 'nothin",
        ),
        (None, "a model cannot be loaded: Python model file not found in"),
        ("import os\nos.abort()\n", "a model's process died while loading; its log:"),
    ],
    ids=["raises", "import", "missing file", "dies"],
)
def test_the_reason_why_a_model_does_not_load_is_one_line(
    model: str | None, reason: str, tmp_path: Path
) -> None:
    repository = make_toy_repository(tmp_path / "repository", model)
    with start(repository, tmp_path / "log") as server:
        with pytest.raises(LaunchError) as caught:
            server.wait_ready(READY_TIMEOUT_S)
        assert str(caught.value).startswith(reason)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["octavo", "vllm"])
def test_octavo_is_a_backend_under_each_name_asked_for(backend: str, tmp_path: Path) -> None:
    """A repository without any model.py reaches Octavo's own code, which misses the engine's arguments."""
    version = tmp_path / "repository/llm/1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(f'backend: "{backend}"\n')
    with (
        start(version.parents[1], tmp_path / "log", backend_names=("octavo", "vllm")) as server,
        pytest.raises(LaunchError, match=r"^the model 'llm' cannot be loaded: .*model\.json cannot be read"),
    ):
        server.wait_ready(READY_TIMEOUT_S)


def test_an_option_that_tritonserver_does_not_know_is_named(tmp_path: Path) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    with (
        start(repository, tmp_path / "log", extra_arguments=("--nonsense=3",)) as server,
        pytest.raises(LaunchError, match="cannot start: unrecognized option '--nonsense=3'"),
    ):
        server.wait_ready(READY_TIMEOUT_S)


def test_the_users_arguments_come_last() -> None:
    server = installation.Installation(
        Path("/s/bin/tritonserver"), {}, None, (), Path("/s/caches"), None, "1"
    )
    options = LaunchOptions(
        Path("/models"), host="0.0.0.0", shm_prefix="mine-", extra_arguments=("--log-info=false",)
    )
    arguments = launcher.command(options, server, Path("/b"))
    assert arguments[0] == "/s/bin/tritonserver"
    assert arguments[-1] == "--log-info=false"
    assert {
        "--model-repository=/models",
        "--backend-directory=/b",
        "--cache-directory=/s/caches",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--http-address=0.0.0.0",
        "--grpc-address=0.0.0.0",
        "--metrics-address=0.0.0.0",
        "--http-port=8000",
        "--exit-timeout-secs=30",
        "--backend-config=python,shm-region-prefix-name=mine-",
        "--backend-config=python,stub-timeout-seconds=1800",
    } <= set(arguments)


def test_two_servers_share_no_name() -> None:
    assert LaunchOptions(Path("a")).shm_prefix != LaunchOptions(Path("a")).shm_prefix


@pytest.mark.parametrize(
    ("service", "option", "variable"),
    [
        ("http_port", "--http-port", "HTTP_PORT"),
        ("grpc_port", "--grpc-port", "GRPC_PORT"),
        ("metrics_port", "--metrics-port", "METRICS_PORT"),
    ],
)
def test_a_taken_port_is_named_with_what_to_pass(
    service: str, option: str, variable: str, tmp_path: Path
) -> None:
    repository = make_toy_repository(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            launcher.check(options_for(repository, **{service: port}))
    assert str(caught.value) == (
        f"port {port} cannot be used: Address already in use; pass another with {option} "
        f"(make serve {variable}=...)"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"http_port": 8123, "grpc_port": 8123}, "--http-port and --grpc-port are both 8123"),
        ({"host": "203.0.113.7"}, "'203.0.113.7' is not an address of this machine"),
        ({"host": "::1"}, "'::1' is no address to listen on; give a name or an IPv4 address"),
        ({"host": ""}, "'' is no address to listen on"),
        ({"host": "no such host"}, "'no such host' is no address to listen on"),
        ({"backend_names": ("python",)}, "cannot be offered as the backend 'python'; try --as vllm"),
        ({"backend_names": ("../x",)}, "cannot be offered as the backend '../x'"),
    ],
)
def test_options_that_cannot_work_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=words):
        launcher.check(options_for(make_toy_repository(tmp_path), **changes))


def test_a_repository_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/README").write_text("no model")
    with pytest.raises(LaunchError, match="absent is not a folder; name one with --model-repository"):
        launcher.check(options_for(tmp_path / "absent"))
    with pytest.raises(LaunchError, match="empty holds no model: a model is a folder with"):
        launcher.check(options_for(tmp_path / "empty"))


def test_a_missing_compiler_and_a_wrong_python_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = make_toy_repository(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
        with pytest.raises(LaunchError, match="no C compiler: none of cc, gcc and clang is on PATH"):
            launcher.check(options_for(repository))
        patch.setattr(build, "compiled_ahead", lambda: True)
        launcher.check(options_for(repository))  # as in a container image
    monkeypatch.setattr(preflight, "python_problem", lambda: "this is Python 3.13")
    with pytest.raises(LaunchError, match=r"this is Python 3\.13"):
        launcher.check(options_for(repository))


def test_too_little_shared_memory_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = make_toy_repository(tmp_path / "repository")
    make_toy_repository(repository, name="second")
    small = os.statvfs_result((4096, 4096, 4096, 2048, 2048, 0, 0, 0, 0, 255))  # 8 MiB free
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda folder: small)
        with pytest.raises(LaunchError) as caught:
            launcher.check(options_for(repository))
        launcher.check(
            options_for(
                repository, extra_arguments=("--backend-config=python,shm-default-byte-size=1048576",)
            )
        )
    assert str(caught.value) == (
        "/dev/shm has 8.0 MiB free, and the models need 32.0 MiB of shared memory there to start with "
        "(2 x 16): make it larger (docker run --shm-size=1g; Kubernetes: an emptyDir of medium Memory; else "
        "`mount -o remount,size=1g /dev/shm`), or start with less: octavo serve ... -- "
        "--backend-config=python,shm-default-byte-size=1048576"
    )
    monkeypatch.setattr(launcher, "SHARED_MEMORY", tmp_path / "absent")
    with pytest.raises(
        LaunchError, match="absent cannot be used: No such file or directory; the server talks"
    ):
        launcher.check(options_for(repository))
