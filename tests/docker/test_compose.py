"""`compose.yaml`, as a Compose implementation reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
COMMON = ["gateway", "grafana", "locust", "prometheus"]
OURS = ["server", "gateway", "locust"]


def compose(*arguments: str, **environment: str) -> dict[str, Any]:
    """The model that `docker compose up` would start, in docker/ and without more words than these."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "OCTAVO_"))
    }
    command = [str(Path(sys.executable).parent / "docker-compose"), *arguments, "config", "--format", "json"]
    ran = subprocess.run(
        command, cwd=DOCKER, env={**clean, **environment}, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def test_there_is_one_server_for_each_profile(services: dict[str, Any]) -> None:
    assert sorted(services) == sorted([*COMMON, "server"])
    assert sorted(compose(COMPOSE_PROFILES="gpu")["services"]) == sorted([*COMMON, "server-gpu"])
    assert sorted(compose("--profile", "gpu")["services"]) == sorted([*COMMON, "server-gpu"])


def test_ports_are_published_on_this_machine_only(services: dict[str, Any]) -> None:
    ports = {name: [(p["host_ip"], p["published"]) for p in s["ports"]] for name, s in services.items()}
    assert {ip for published in ports.values() for ip, _ in published} == {"127.0.0.1"}
    assert [port for _, port in ports["server"]] == ["8000", "8001", "8002"]
    wide = compose(OCTAVO_PUBLISH="0.0.0.0")["services"]["gateway"]["ports"]
    assert [(p["host_ip"], p["published"]) for p in wide] == [("0.0.0.0", "9000")]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_container_is_hardened(profile: str) -> None:
    for name, service in compose(COMPOSE_PROFILES=profile)["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) >= 512 << 20, name
        assert service["pids_limit"] >= 256, name
        assert "privileged" not in service, name
        assert service["image"].rpartition(":")[2] not in ("", "latest"), name
        if name in (*OURS, "server-gpu"):
            assert any(mount.startswith("/run/octavo:uid=10001,gid=10001") for mount in service["tmpfs"]), (
                name
            )


def test_the_server_has_shared_memory_time_to_stop_and_its_models(services: dict[str, Any]) -> None:
    for server in (services["server"], compose(COMPOSE_PROFILES="gpu")["services"]["server-gpu"]):
        assert int(server["shm_size"]) == 1 << 30
        assert server["stop_grace_period"] == "45s"  # more than the launcher's 30 s and 5 s
        models = next(volume for volume in server["volumes"] if volume["target"] == "/models")
        assert (models["type"], models["read_only"]) == ("volume", True)


def test_the_gpu_server_asks_for_a_gpu_and_answers_by_the_same_name() -> None:
    server = compose(COMPOSE_PROFILES="gpu")["services"]["server-gpu"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert server["networks"]["default"]["aliases"] == ["server"]


@pytest.mark.parametrize(("profile", "server"), [("cpu", "server"), ("gpu", "server-gpu")])
def test_who_asks_the_server_waits_until_it_is_healthy(profile: str, server: str) -> None:
    services = compose(COMPOSE_PROFILES=profile)["services"]
    for name in ("gateway", "locust"):
        assert services[name]["depends_on"][server]["condition"] == "service_healthy"


@pytest.mark.parametrize(("keys", "said"), [("", "--no-api-keys"), ("one,two", "")])
def test_the_gateway_goes_without_keys_only_when_there_are_none(keys: str, said: str, tmp_path: Path) -> None:
    gateway = compose(OCTAVO_API_KEYS=keys)["services"]["gateway"]
    assert gateway["environment"]["OCTAVO_API_KEYS"] == keys
    fake = tmp_path / "octavo"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    # `config` prints a dollar sign doubled, so that its output can be read again.
    command = [*gateway["entrypoint"], *(word.replace("$$", "$") for word in gateway["command"])]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OCTAVO_API_KEYS": keys}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"gateway grpc://server:8001 --host 0.0.0.0 --port 9000 {said}".strip()


def test_what_is_mounted_from_here_is_here(services: dict[str, Any]) -> None:
    bound = [v for s in services.values() for v in s.get("volumes", []) if v["type"] == "bind"]
    assert len(bound) == 3
    assert all(Path(volume["source"]).is_dir() and volume["read_only"] for volume in bound)
