"""What a built image must be: its settings, its contents, and a server and a gateway run from it.

Used by `image`. The programs run as the image's user on a root file system that the kernel holds read-only
(a bind mount, remounted so in a mount namespace of their own), with the mounts that `compose.yaml` names.
Whatever is not as it should be raises `Wrong`.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildah import Buildah, Failed

import processes
from ports import free_ports

COMPILERS = {"cc", "c++", "gcc", "g++", "clang", "tcc", "ld", "as", "cpp", "make", "pip", "pip3"}
USER = "10001:10001"
READY_S, STOP_S = 120.0, 45.0
PROMPT, ANSWER = "The capital of France is", "Paris"
# $1 is the container's root, $2 and $3 what /run/octavo and /tmp are; then follows what runs.
_READ_ONLY = """
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
for place in proc dev sys; do mount --rbind "/$place" "$1/$place"; done
mount --bind "$2" "$1/run/octavo"
mount --bind "$3" "$1/tmp"
root="$1"
shift 3
exec chroot "$root" "$@"
"""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Wrong(Exception):
    """The image is not what it should be."""


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Wrong(f"{what}: {found!r}, and {wanted!r} is wanted")
    print(f"ok: {what}: {found}", flush=True)


@dataclass
class Container:
    """A container of an image, and its programs. `root` is where its file system lies here."""

    root: Path
    variables: list[str]  # NAME=value
    folder: Path  # for the writable mounts and logs

    def command(self, *arguments: str, user: str = USER) -> list[str]:
        """What runs `arguments` as `docker run --read-only --cap-drop ALL` would, without its network."""
        places = []
        for name in ("run", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
            (self.folder / name).chmod(0o1777)
            places.append(str(self.folder / name))
        uid, gid = user.split(":")
        dropped = ["--bounding-set=-all", "--no-new-privs", "--clear-groups"]
        return [
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", _READ_ONLY, "sh"),
            *(str(self.root), *places),
            *("setpriv", "--reuid", uid, "--regid", gid, *dropped, "env", "-i", *self.variables, *arguments),
        ]

    def run(self, *arguments: str, user: str = USER) -> "subprocess.CompletedProcess[str]":
        command = self.command(*arguments, user=user)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    @contextlib.contextmanager
    def running(self, name: str, *arguments: str) -> Iterator["Program"]:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        program = Program(process, log, arguments[0])
        try:
            yield program
        finally:
            program.kill()


@dataclass
class Program:
    """What runs in a container: the commands before it have become it."""

    process: "subprocess.Popen[bytes]"
    log: Path
    executable: str

    def descendants(self) -> list[int]:
        """Its processes, itself first."""
        found = [self.process.pid]
        for pid in found:
            found += processes.children(pid)
        return found

    def wait(self, url: str, timeout_s: float) -> float:
        started = time.monotonic()
        while True:
            with contextlib.suppress(OSError), _DIRECT.open(url, timeout=2) as answer:
                if answer.status == 200:
                    return time.monotonic() - started
            if self.process.poll() is not None or time.monotonic() - started > timeout_s:
                raise Wrong(f"{self.executable} does not answer at {url}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self, with_signal: int, timeout_s: float) -> tuple[int, float]:
        """Its exit status, and the seconds that it took."""
        started = time.monotonic()
        self.process.send_signal(with_signal)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Wrong(f"{self.executable} did not stop within {timeout_s:.0f} s") from None
        return status, time.monotonic() - started

    def kill(self) -> None:
        if self.process.poll() is not None:
            return
        for pid in reversed(self.descendants()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def user_of(pid: int) -> int | None:
    uids = processes.status(pid).get("Uid")
    return None if uids is None else int(uids.split()[0])


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with _DIRECT.open(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Wrong(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error


def check(buildah: Buildah, image: str, folder: Path) -> dict[str, Any]:
    """The server's image. Returns figures: its size, how long starting and stopping takes."""
    settings = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    expect("user", settings["User"], USER)
    expect("stop signal", settings["StopSignal"], "SIGTERM")
    expect("volumes", sorted(settings["Volumes"]), ["/models"])
    expect("ports", sorted(settings["ExposedPorts"]), ["8000/tcp", "8001/tcp", "8002/tcp"])
    entrypoint = settings["Entrypoint"]
    expect("entrypoint", entrypoint[:2], ["octavo", "serve"])
    with container_of(buildah, image, folder) as container:
        figures: dict[str, Any] = {"image_bytes": size_bytes(container.root)}
        figures["largest_bytes"] = dict(largest(container.root / "opt/octavo"))
        expect("compilers and installers", programs(container.root, COMPILERS.__contains__), [])
        kernels = sorted(
            p.name.split("-")[0] for p in (container.root / "opt/octavo/cache/kernels").iterdir()
        )
        expect("kernels compiled ahead", kernels, ["amx", "avx2", "avx512"])
        http, grpc, metrics, gateway = free_ports(4)
        health = [word.replace(":8000/", f":{http}/") for word in settings["Healthcheck"]["Test"][1:]]
        expect("health without a server", container.run(*health).returncode, 1)
        refused = container.run("touch", "/opt/octavo/x", user="0:0").stderr
        expect(f"writing as root ({refused.strip()[-60:]!r})", "Read-only file system" in refused, True)
        ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        with container.running("serve", *entrypoint, *ports) as server:
            figures["ready_s"] = round(server.wait(f"http://127.0.0.1:{http}/v2/health/ready", READY_S), 1)
            users = {user_of(pid) for pid in server.descendants() if name_of(pid) == "tritonserver"}
            expect("tritonserver's user", users, {10001})
            check_answers(container, http, gateway)
            expect("health with the server", container.run(*health).returncode, 0)
            by_signal = getattr(signal, settings["StopSignal"])
            status, figures["stop_s"] = server.stop(by_signal, STOP_S)
            expect("exit status after SIGTERM", status, 0)
            expect("its last word", server.log.read_text().splitlines()[-1], "stopped")
    figures["stop_s"] = round(figures["stop_s"], 1)
    return figures


def check_answers(container: Container, http: int, gateway: int) -> None:
    """Asks the server, and then the gateway that is run from the same image in front of it."""
    body = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "exclude_input_in_output": True}
    said = ask(f"http://127.0.0.1:{http}/v2/models/llm/generate", body)["text_output"]
    expect(f"{PROMPT!r} ({said.strip()!r})", ANSWER in said, True)
    arguments = ["gateway", f"http://127.0.0.1:{http}", "--host", "127.0.0.1", "--port", str(gateway)]
    with container.running("gateway", "octavo", *arguments) as program:
        program.wait(f"http://127.0.0.1:{gateway}/health/ready", 30.0)
        expect("the gateway's user", user_of(program.process.pid), 10001)
        body = {"model": "llm", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        said = ask(f"http://127.0.0.1:{gateway}/v1/completions", body)["choices"][0]["text"]
        expect(f"the same by the gateway ({said.strip()!r})", ANSWER in said, True)
        status, _ = program.stop(signal.SIGTERM, STOP_S)
        expect("the gateway's exit status after SIGTERM", status, -signal.SIGTERM)  # uvicorn's way


def check_loadtest(buildah: Buildah, image: str, folder: Path) -> dict[str, Any]:
    """The stage with Locust: it starts as its user, and its page answers."""
    settings = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    expect("user of the load test", settings["User"], USER)
    with container_of(buildah, image, folder) as container:
        expect("compilers and installers", programs(container.root, COMPILERS.__contains__), [])
        (port,) = free_ports(1)
        arguments = ["--web-host", "127.0.0.1", "--web-port", str(port), "--host", "http://127.0.0.1:1"]
        with container.running("locust", *settings["Entrypoint"], *arguments) as program:
            program.wait(f"http://127.0.0.1:{port}/", 30.0)
            expect("user of Locust", user_of(program.process.pid), 10001)
        return {"loadtest_image_bytes": size_bytes(container.root)}


@contextlib.contextmanager
def container_of(buildah: Buildah, image: str, folder: Path) -> Iterator[Container]:
    name = buildah("from", "--pull-never", image)
    try:
        root = Path(buildah("mount", name))
        settings = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
        yield Container(root, settings["Env"], folder)
    finally:
        with contextlib.suppress(Failed):
            buildah("rm", name)


def name_of(pid: int) -> str | None:
    return processes.status(pid).get("Name")


def programs(root: Path, unwanted: Callable[[str], bool]) -> list[str]:
    """Executable files below `root` that have such a name, with or without a prefix or a version."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            words = name.split("-")
            path = Path(folder) / name
            if unwanted(words[-1]) or unwanted(words[-2] if len(words) > 1 and words[-1].isdigit() else ""):
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) or mode & 0o111:
                    found.append(str(path.relative_to(root)))
    return sorted(found)


def size_bytes(root: Path) -> int:
    """Of the files below it, hard links once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            status = (Path(folder) / name).lstat()
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())


def largest(root: Path, count: int = 5) -> list[tuple[str, int]]:
    packages = [p for p in root.glob("venv/lib/python3*/site-packages/*") if p.is_dir()]
    sizes = sorted(((p.name, size_bytes(p)) for p in packages), key=lambda pair: -pair[1])
    return sizes[:count]
