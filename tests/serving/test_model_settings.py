"""What config.pbtxt and multi_lora.json may say, and the words for what they may not."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.serving.model_settings import Settings, adapters, parameters_of, refuse_adapters


def read(**parameters: str) -> Settings:
    return Settings.read(parameters, environ={})


def test_defaults() -> None:
    assert read() == Settings(20.0, True, True, False, (), False)


@pytest.mark.parametrize(("value", "on"), [("true", True), ("YES", True), ("False", False), ("no", False)])
def test_switches_of_the_vllm_backend_are_read(value: str, on: bool) -> None:
    assert read(REPORT_CUSTOM_METRICS=value).report_metrics is on
    assert read(ENABLE_VLLM_HEALTH_CHECK=value).check_health is on


def test_the_deadline_is_the_models_own_before_the_launchers() -> None:
    environ = {"OCTAVO_SHUTDOWN_TIMEOUT_S": "7"}
    assert Settings.read({}, environ).shutdown_timeout_s == 7
    assert Settings.read({"shutdown_timeout_s": "3"}, environ).shutdown_timeout_s == 3


def test_the_request_log_is_json_or_off() -> None:
    assert read(request_log="json").log_requests
    assert not read(request_log="off").log_requests


def test_gpus_are_numbers() -> None:
    assert read(GPU_DEVICE_IDS="0, 3").gpu_ids == (0, 3)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "REPORT_CUSTOM_METRICS",
            "maybe",
            "'REPORT_CUSTOM_METRICS' is 'maybe'; allowed: true, yes, false, no",
        ),
        ("ENABLE_VLLM_HEALTH_CHECK", "1", "'ENABLE_VLLM_HEALTH_CHECK' is '1'; allowed: true, yes, false, no"),
        ("GPU_DEVICE_IDS", "0,0", "'GPU_DEVICE_IDS' is '0,0'; allowed: numbers of GPUs, each once"),
        ("GPU_DEVICE_IDS", "-1", "'GPU_DEVICE_IDS' is '-1'; allowed: numbers of GPUs"),
        ("shutdown_timeout_s", "nan", "'shutdown_timeout_s' is 'nan'; allowed: 0 to 86400 seconds"),
        ("coalesce_responses", "yes", "'coalesce_responses' is 'yes'; allowed: 'true'"),
        ("request_log", "text", "'request_log' is 'text'; allowed: 'json'"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(**{name: value})


def test_parameters_come_as_triton_passes_them() -> None:
    assert parameters_of({"parameters": {"a": {"string_value": "b"}}}) == {"a": "b"}
    assert parameters_of({"parameters": None}) == parameters_of({}) == {}


def test_adapters_are_read_and_refused_only_when_they_are_asked_for(tmp_path: Path) -> None:
    assert adapters(tmp_path) == {}
    (tmp_path / "multi_lora.json").write_text(json.dumps({"sql": "/adapters/sql", "alpaca": "x"}))
    assert adapters(tmp_path) == {"sql": "/adapters/sql", "alpaca": "x"}
    for value in (False, "false", None):
        refuse_adapters(tmp_path, {"enable_lora": value})
    for value in (True, "true"):
        with pytest.raises(
            ConfigError, match=r"'enable_lora' is true \(multi_lora.json names: alpaca, sql\)"
        ):
            refuse_adapters(tmp_path, {"enable_lora": value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", r"multi_lora.json: 'multi_lora.json' is JSON of a list; expected an object"),
        ('{"a": 1}', "multi_lora.json: 'a' is 1; expected the adapter's folder"),
        ('{"": "x"}', "multi_lora.json: '' is 'x'; expected the adapter's folder"),
    ],
)
def test_a_file_of_adapters_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "multi_lora.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        adapters(tmp_path)
