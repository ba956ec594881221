"""The Kubernetes manifests: valid by Kubernetes' own schemas, and fit for one another."""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docker/kubernetes"
BASE = FOLDER / "base"
# What the Prometheus operator's resource requires, and the fields of it that are used here: no others pass.
SERVICE_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "spec": {
            "type": "object",
            "required": ["endpoints", "selector"],
            "additionalProperties": False,
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}
                    },
                },
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                            "scrapeTimeout": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                        },
                    },
                },
            },
        },
    },
}


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def manifests(folder: Path) -> list[Path]:
    names = load(folder / "kustomization.yaml")["resources"]
    return [folder / name for name in names if name.endswith(".yaml")]


def container(folder: Path = BASE) -> dict[str, Any]:
    (found,) = load(folder / "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_kustomization_names_every_manifest() -> None:
    beside = {path for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml"}
    assert set(manifests(BASE)) == beside
    kinds = sorted(load(path)["kind"] for path in beside)
    assert kinds == [
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceMonitor",
    ]


@pytest.mark.parametrize("path", [p for p in manifests(BASE) if p.name != "service-monitor.yaml"], ids=str)
def test_manifests_are_valid(path: Path) -> None:
    kubernetes_validate.validate(load(path), "1.37", strict=True)


def test_the_validator_refuses_what_is_wrong() -> None:
    wrong = load(BASE / "deployment.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_service_monitor_is_valid_and_fits_the_service() -> None:
    monitor, service = load(BASE / "service-monitor.yaml"), load(BASE / "service.yaml")
    jsonschema.validate(monitor, SERVICE_MONITOR)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert [ports[endpoint["port"]] for endpoint in monitor["spec"]["endpoints"]] == [8002]


def test_everything_selects_the_same_pods() -> None:
    deployment = load(BASE / "deployment.yaml")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert load(BASE / "service.yaml")["spec"]["selector"] == labels
    assert load(BASE / "disruption-budget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load(BASE / "network-policy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert load(BASE / "autoscaler.yaml")["spec"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": load(BASE / "deployment.yaml")["metadata"]["name"],
    }


def test_probes_ask_triton_and_the_pod_has_time_to_stop() -> None:
    server = container()
    paths = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    ready = "/v2/health/ready"
    assert paths == {"startup": ready, "readiness": ready, "liveness": "/v2/health/live"}
    pod = load(BASE / "deployment.yaml")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 5 + 30 + 5  # preStop, the launcher's deadline and its kill


def test_the_pod_is_humble_and_writes_only_where_it_says() -> None:
    pod = load(BASE / "deployment.yaml")["spec"]["template"]["spec"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
    assert pod["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert sorted(mounts) == ["/dev/shm", "/run/octavo", "/tmp"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_the_gpu_overlay_changes_the_base_s_container() -> None:
    assert load(FOLDER / "gpu/kustomization.yaml")["resources"] == ["../base"]
    patch = container(FOLDER / "gpu")
    assert (patch["name"], patch["image"]) == (container()["name"], "octavo:gpu")
    assert patch["resources"]["limits"]["nvidia.com/gpu"] == 1
