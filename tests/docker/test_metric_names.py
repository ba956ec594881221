"""The dashboard, the alerts and the autoscaler ask for metrics that the server has."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from octavo.serving import metric_tables

DOCKER = Path(__file__).parents[2] / "docker"
NAME = re.compile(r"\b(?:vllm|octavo|nv_trt_llm):?\w+")
QUEUE = "vllm:num_requests_waiting"
# What says how far the server is and how well; no dashboard should be without it.
TOLD = {
    "octavo:ready",
    QUEUE,
    "vllm:num_requests_running",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "octavo:queue_time_seconds_bucket",
    "octavo:step_time_seconds_bucket",
    "octavo:kv_blocks_used",
    "octavo:prefix_cache_hit_rate",
    "vllm:num_preemptions_total",
    "octavo:swap_out_bytes_total",
    "octavo:coalesced_responses_total",
}


def exported() -> set[str]:
    plain = {series.name for series in (*metric_tables.GAUGES, *metric_tables.COUNTERS)}
    histograms = {s.name for s in (*metric_tables.REQUEST_HISTOGRAMS, *metric_tables.STEP_HISTOGRAMS)}
    return plain | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}


def named_in(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in NAME.findall(expression) if ":" in name}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/octavo.json").read_text())
    return found


def load(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def test_the_dashboard_asks_for_what_there_is_and_misses_nothing() -> None:
    names = named_in([target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]])
    assert names - exported() == set()
    assert TOLD - names == set()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_the_dashboard_is_provisioned_with_its_source() -> None:
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    used = {t["datasource"]["uid"] for panel in dashboard()["panels"] for t in (panel, *panel["targets"])}
    assert used == {source["uid"]}
    (provider,) = load("grafana/provisioning/dashboards/octavo.yaml")["providers"]
    mounted = load("compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounted


def test_alerts_and_the_rule_of_the_autoscaler_ask_for_what_there_is() -> None:
    (group,) = load("prometheus/alerts.yml")["groups"]
    names = named_in([rule["expr"] for rule in group["rules"]])
    assert len(names) >= 5
    assert names - exported() == set()
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in group["rules"])
    (rule,) = load("kubernetes/prometheus-adapter-rule.yaml")["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] == QUEUE
    assert QUEUE in exported()
    (metric,) = load("kubernetes/base/autoscaler.yaml")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


def test_prometheus_scrapes_the_server_and_reads_the_alerts() -> None:
    settings = load("prometheus/prometheus.yml")
    assert settings["rule_files"] == ["/etc/prometheus/alerts.yml"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in settings["scrape_configs"]}
    assert targets["octavo"] == ["server:8002"]
