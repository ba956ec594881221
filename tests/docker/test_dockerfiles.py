"""The Dockerfiles and the programs that they run, as far as no image has to be built for that."""

import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import host_setup
import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
NAMES = ["Dockerfile.cpu", "Dockerfile.gpu"]
BIN = Path(sys.executable).parent


def stages(name: str) -> list[list[str]]:
    """A Dockerfile's instructions by stage, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[str]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("FROM "):
            found.append([])
        found[-1].append(line)
    return found[1:]


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    command = [str(BIN / "hadolint"), "--no-color", str(DOCKER / name)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_copied_is_there_and_reaches_the_builder(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        word
        for stage in stages(name)
        for line in stage
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
        if not word.startswith("--")
    ]
    assert len(copied) >= 8
    assert [word for word in copied if not (ROOT / word).exists()] == []
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    outside = [
        w for w in copied if not any(w == a or Path(w).match(a) or a.startswith(f"{w}/") for a in allowed)
    ]
    assert outside == []


@pytest.mark.parametrize("name", NAMES)
def test_the_last_stage_is_small_and_humble(name: str) -> None:
    names = [stage[0].split() for stage in stages(name)]
    by_name = {words[3]: (words[1], stage) for words, stage in zip(names, stages(name), strict=True)}
    lines: list[str] = []
    wanted: str | None = names[-1][3]
    while wanted in by_name:  # a stage begins with what it is made from
        parent, stage = by_name[wanted]
        lines, wanted = [*stage, *lines], parent
    assert names[-1][3] == "server"
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert "STOPSIGNAL SIGTERM" in lines
    assert "EXPOSE 8000 8001 8002" in lines
    assert any(line.startswith("VOLUME") and "/models" in line for line in lines)
    assert any(line.startswith("HEALTHCHECK") and "/v2/health/ready" in line for line in lines)
    assert any(line.startswith("ENTRYPOINT") and '"octavo", "serve"' in line for line in lines)
    installed = " ".join(re.findall(r"apt-get install (.*?)&&", " ".join(lines)))
    assert "libpython3" in installed
    assert re.findall(r"\b(?:gcc|g\+\+|clang|libc6-dev|build-essential|\S+-dev)\b", installed) == []


@pytest.mark.parametrize("name", NAMES)
def test_bases_are_pinned_and_the_model_is_that_of_the_makefile(name: str) -> None:
    text = (DOCKER / name).read_text()
    pins = dict(re.findall(r"^ARG (DEBIAN|TRITONSERVER)=(\S+)$", text, re.MULTILINE))
    assert [bool(re.fullmatch(r"[\d.]+-(slim|py3)", tag)) for tag in pins.values()] == [True]
    package = re.search(r"^MODEL_PACKAGE := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert package is not None
    assert package[1] in text


def health_of(url: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(DOCKER / "healthcheck.py"), url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_health_check_tells_200_from_the_rest() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/good" else 503)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        here = f"http://127.0.0.1:{server.server_port}"
        statuses = [health_of(f"{here}{path}").returncode for path in ("/good", "/bad")]
        server.shutdown()
        thread.join()
    assert statuses == [0, 1]
    gone = health_of(f"{here}/good")
    assert (gone.returncode, gone.stderr) == (1, "")
    assert "refused" in gone.stdout


def test_the_gpu_entrypoint_brings_the_compiled_module_once(tmp_path: Path) -> None:
    seed, cache = tmp_path / "seed", tmp_path / "cache"
    (seed / "KEY").mkdir(parents=True)
    (seed / "KEY/cuda_utils.so").write_text("new")
    script = tmp_path / "entrypoint.sh"
    script.write_text((DOCKER / "entrypoint.sh").read_text().replace("/opt/octavo/triton-cache", str(seed)))
    command = ["sh", str(script), "echo", "started", "with it"]
    environment = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin"}
    for content in ("new", "kept"):
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert ran.stdout == "started with it\n"
        assert (cache / "KEY/cuda_utils.so").read_text() == content
        (cache / "KEY/cuda_utils.so").write_text("kept")


def test_pip_settings_are_read_as_pip_means_them(tmp_path: Path) -> None:
    index = tmp_path / "index/simple"
    index.mkdir(parents=True)
    certificate = tmp_path / "ca.crt"
    certificate.write_text("a certificate")
    settings = host_setup.pip_settings(
        f":env:.find-links='{tmp_path}/index'\n:env:.no-input='1'\nglobal.cert='{certificate}'\n"
        f"global.extra-index-url='https://one.example/simple file://{index}'\n"
    )
    folder = tmp_path / "build"
    folder.mkdir()
    assert host_setup.pip_mounts(settings, folder) == [
        f"{folder}/pip:/mnt/pip:ro",
        f"{folder}/pip/pip.conf:/etc/pip.conf:ro",
        f"{tmp_path}/index:{tmp_path}/index:ro",
    ]
    assert (folder / "pip/ca.crt").read_text() == "a certificate"
    assert (folder / "pip/pip.conf").read_text().splitlines() == [
        "[global]",
        "cert = /mnt/pip/ca.crt",
        f"extra-index-url = https://one.example/simple file://{index}",
        f"find-links = {tmp_path}/index",
        "no-input = 1",
    ]
