"""What the pages on tuning, troubleshooting and migration name exists: arguments, metrics, options, texts."""

import functools
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.config import IGNORED, NEUTRAL, EngineConfig
from octavo.serving import codec, metric_tables, model_settings
from octavo_client import Options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "backend/docs"
ARGUMENTS = {field.name for field in fields(EngineConfig)}
METRICS = {
    series.name
    for table in ("GAUGES", "COUNTERS", "REQUEST_HISTOGRAMS", "STEP_HISTOGRAMS")
    for series in getattr(metric_tables, table)
}
TENSORS = {spec.name for spec in (*codec.INPUTS, *codec.OUTPUTS)}
REQUESTS = {"cache_salt", "lora_name", "max_tokens", "triton_grpc_error"}
KNOWN = ARGUMENTS | set(IGNORED) | set(NEUTRAL) | TENSORS | set(model_settings.PARAMETERS) | REQUESTS


def text(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.mark.parametrize("page", ["tuning.md", "migration.md"])
def test_every_name_in_snake_case_exists(page: str) -> None:
    names = set(re.findall(r"`(?:\")?([a-z]+(?:_[a-z]+)+)\b", text(page)))
    names -= {"fp8_e4m3"} | {name for name in names if name.startswith("model_repository")}
    assert names - KNOWN - {"return_"} == set()
    assert {"max_num_batched_tokens", "swap_space"} <= names


@pytest.mark.parametrize("page", ["tuning.md", "migration.md", "troubleshooting.md"])
def test_every_metric_exists(page: str) -> None:
    named = set(re.findall(r"`((?:vllm|octavo):\w+)", text(page)))
    assert named - METRICS == set()


@pytest.mark.parametrize("page", ["tuning.md", "migration.md", "troubleshooting.md", "client.md"])
def test_every_link_and_option_exists(page: str) -> None:
    for target in re.findall(r"\]\(([\w/.-]+)\)", text(page)):
        assert (DOCS / target).exists(), target
    for command in ("bench", "top", "doctor", "check", "serve"):
        used = set(re.findall(rf"octavo {command} [^`\n]*", text(page)))
        options = {
            option for line in used for option in re.findall(r"(?<= )--[a-z][a-z-]+", line.split(" -- ")[0])
        }
        if options:
            shown = help_of(command)
            assert {option for option in options if option not in shown} == set()


@functools.cache
def help_of(command: str) -> str:
    asked = [sys.executable, "-m", "octavo_client", command, "--help"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def test_defaults_that_the_pages_name() -> None:
    config = EngineConfig(model="x")
    page = text("tuning.md")
    for name in ("max_num_seqs", "block_size", "gpu_memory_utilization"):
        assert f"`{name}` ({getattr(config, name)})" in page
    assert f"`max_num_batched_tokens` ({config.for_model(8192).token_budget}, or `max_num_seqs`" in page
    assert (config.scheduling_policy, config.preemption_mode, config.kv_cache_dtype) == (
        "priority",
        "auto",
        "auto",
    )
    assert "`scheduling_policy`\n(`priority`)" in page
    assert (config.max_queue_size, config.target_itl_ms, config.fair_scheduling) == (None, None, False)
    assert (config.enable_prefix_caching, config.enable_chunked_prefill, config.enforce_eager) == (
        True,
        True,
        False,
    )


def test_figures_are_those_of_the_claims() -> None:
    claims = text("claims.md")
    for figure in (
        "| 323.7 | 19.3 |",
        "| 512 tokens a step | 12.5 | 723.9 | 2.3 |",
        "| 258.5 | 6.4 | 0.95 |",
    ):
        assert figure in claims
    assert round(65340 / 35429, 1) == 1.8
    assert "| 35,429 | 65,340 |" in claims


def test_error_texts_that_are_quoted_are_in_the_code() -> None:
    source = "\n".join(
        path.read_text() for root in ("backend", "kernels", "client") for path in (ROOT / root).rglob("*.py")
    )
    quoted = [
        "cannot be used",
        "no tritonserver to start",
        "which is not installed",
        "MiB free, and the models need",
        "unknown engine argument",
        "holds no model: a model is a folder with a",
        "CPU kernels run as the slow torch reference",
        "GPU kernels run as the slow torch reference",
        "the GPU has compute capability",
        "the GPU is lost to this process",
        "CUDA graphs are off, ",
        "no connection to the server",
    ]
    page = text("troubleshooting.md")
    for words in quoted:
        assert words in source, words
        assert words in page, words


def test_the_options_of_a_request_that_the_pages_name() -> None:
    assert "cache_salt" in Options.__annotations__
