"""Engine arguments: vLLM's names, and a clear word for everything that is wrong."""

import dataclasses
import json
import logging
from typing import Any

import pytest

from octavo.config import IGNORED, NEUTRAL, EngineConfig, resolve, sort_arguments
from octavo.errors import ConfigError


def test_names_and_defaults_are_those_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo"):
        config = resolve({"model": "m", "swap_space": 2, "compilation_config": 3, "max_num_seqs": 4})
    assert (config.model, config.max_num_seqs, config.block_size, config.swap_space) == ("m", 4, 16, 2)
    assert "compilation_config" in caplog.text


def test_switches_may_be_words_as_in_repositories_of_the_vllm_backend() -> None:
    config = resolve({"model": "m", "disable_log_stats": "True", "enable_prefix_caching": "false"})
    assert (config.disable_log_stats, config.enable_prefix_caching) == (True, False)


def test_graphs_are_as_vllms_arguments_say() -> None:
    assert not resolve({"model": "m"}).enforce_eager
    config = resolve({"model": "m", "enforce_eager": "true", "cudagraph_capture_sizes": [8, 1]})
    assert (config.enforce_eager, config.cudagraph_capture_sizes) == (True, (8, 1))
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_an_error_about_one_argument_names_it_for_programs_too() -> None:
    for arguments, key in (
        ({"model": "m", "block_size": 0}, "block_size"),
        ({"model": "m", "dtype": "int3"}, "dtype"),
        ({"model": "m", "seed": "x"}, "seed"),
        ({"model": "m", "enable_lora": True}, "enable_lora"),
        ({}, "model"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(arguments)
        assert caught.value.key == key


NOTHING = {
    "enable_lora": False,
    "max_loras": 4,
    "speculative_config": None,
    "num_speculative_tokens": 0,
    "swap_space": None,
    "preemption_mode": None,
    "cpu_offload_gb": 0,
    "kv_cache_dtype": "auto",
    "quantization": None,
    "tokenizer": None,
    "block_size": None,
    "max_num_seqs": None,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "hf_overrides": {},
    "task": "generate",
    "disable_log_requests": "true",
    "limit_mm_per_prompt": {"image": 1},
}


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    assert resolve({"model": "m", **NOTHING}) == resolve({"model": "m"})
    assert resolve({"model": "m", "enable_lora": "False"}) == resolve({"model": "m"})


def test_every_argument_is_honoured_ignored_or_refused_with_a_reason() -> None:
    parts = sort_arguments({"model": "m", "kernel_config": {}, "seed": None, "task": "classify", "x": 1})
    assert parts.honoured == {"model": "m"}
    assert parts.ignored == {
        "kernel_config": "it is about vLLM's own kernels and compiler",
        "seed": "null stands for the default",
    }
    assert sorted(parts.refused) == ["task", "x"]


def test_no_name_is_in_two_tables() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not fields & IGNORED.keys()
    assert not fields & NEUTRAL.keys()
    assert not IGNORED.keys() & NEUTRAL.keys()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "'model' is missing"),
        ({"model": ""}, "'model' is ''; allowed: the path"),
        ({"model": 5}, "'model' is 5; it must be a string"),
        (
            {"model": "m", "max_num_seq": 4},
            "unknown engine argument 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        ({"model": "m", "qqq": 4}, "unknown engine argument 'qqq'; known: "),
        ({"model": "m", "dtype": "int3"}, "'dtype' is 'int3'; allowed: auto, float32, bfloat16, float16"),
        ({"model": "m", "block_size": 0}, "'block_size' is 0; allowed: 1 to 1024"),
        ({"model": "m", "cudagraph_capture_sizes": 8}, "'cudagraph_capture_sizes' is 8; it must be a list"),
        (
            {"model": "m", "cudagraph_capture_sizes": [8, 0]},
            "'cudagraph_capture_sizes' is (8, 0); allowed: a list of 1 to 1000 numbers of sequences, or",
        ),
        ({"model": "m", "cudagraph_capture_sizes": []}, "'cudagraph_capture_sizes' is (); allowed: a list"),
        ({"model": "m", "cudagraph_capture_sizes": ["8"]}, "'cudagraph_capture_sizes' is ('8',); allowed:"),
        ({"model": "m", "block_size": "16"}, "'block_size' is '16'; it must be an integer"),
        ({"model": "m", "block_size": True}, "'block_size' is True; it must be an integer"),
        (
            {"model": "m", "max_num_batched_tokens": 8},
            "'max_num_batched_tokens' is 8; allowed: max_num_seqs (256)",
        ),
        (
            {"model": "m", "tensor_parallel_size": 2},
            "'tensor_parallel_size' is 2; allowed: 1 in this version",
        ),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "'gpu_memory_utilization' is 1.5; allowed: above 0"),
        ({"model": "m", "swap_space": -1}, "'swap_space' is -1; allowed: 0 to 1048576, in GiB"),
        ({"model": "m", "preemption_mode": "x"}, "'preemption_mode' is 'x'; allowed: auto, swap, recompute"),
        ({"model": "m", "max_queue_size": 0}, "'max_queue_size' is 0; allowed: 1 and more"),
        ({"model": "m", "fair_scheduling": 1}, "'fair_scheduling' is 1; it must be true or false"),
        ({"model": "m", "kv_cache_memory_bytes": 0}, "'kv_cache_memory_bytes' is 0; allowed: 1 and more"),
        ({"model": "m", "target_itl_ms": 0}, "'target_itl_ms' is 0; allowed: above 0"),
        (
            {"model": "m", "target_itl_ms": 50, "enable_chunked_prefill": False},
            "'target_itl_ms' is 50; allowed: above 0, and null where enable_chunked_prefill is false",
        ),
        (
            {"model": "m", "scheduling_policy": "lifo"},
            "'scheduling_policy' is 'lifo'; allowed: fcfs, priority, sjf",
        ),
        ({"model": "m", "max_model_len": 1}, "'max_model_len' is 1; allowed: 2 and more"),
        (
            {"model": "m", "enable_lora": True},
            "'enable_lora' is True: LoRA adapters are not supported by this version; allowed: false and null",
        ),
        (
            {"model": "m", "speculative_config": {"method": "ngram"}},
            "'speculative_config' is {'method': 'ngram'}: speculative decoding is not supported by this ",
        ),
        ({"model": "m", "runner": "draft"}, 'allowed: "auto" and "generate" and "pooling" and null'),
        ({"model": None}, "'model' is missing"),
        ({"model": "m", "max_log_len": -1}, "'max_log_len' is -1; allowed: 0 and more"),
        ({"model": "m", "otlp_traces_endpoint": ""}, "'otlp_traces_endpoint' is ''; allowed: a URL"),
        ({"model": "m", "record_steps": ""}, "'record_steps' is ''; allowed: a folder"),
        (
            {"model": "m", "record_steps": "a", "prefix_cache_dir": "/b"},
            "'record_steps' is 'a'; allowed: a folder, and null where prefix_cache_dir is set",
        ),
        ({"model": "m", "record_steps_bytes": 0}, "'record_steps_bytes' is 0; allowed: 1 and more"),
        (
            {"model": "m", "prefix_cache_dir": "cache"},
            "'prefix_cache_dir' is 'cache'; allowed: the absolute path of a folder",
        ),
        ({"model": "m", "prefix_cache_dir": ""}, "'prefix_cache_dir' is ''; allowed: the absolute path"),
        (
            {"model": "m", "prefix_cache_dir": "/x", "enable_prefix_caching": False},
            "'prefix_cache_dir' is '/x'; allowed: null, since enable_prefix_caching is false",
        ),
        ({"model": "m", "prefix_cache_disk_gib": 0}, "'prefix_cache_disk_gib' is 0; allowed: above 0"),
        (
            {"model": "m", "disable_log_stats": "yes"},
            "'disable_log_stats' is 'yes'; it must be true or false",
        ),
        (
            {"model": "m", "enable_log_requests": True, "disable_log_requests": "true"},
            "'enable_log_requests' and 'disable_log_requests' are both true; leave one of them out",
        ),
        ({"model": "m", "num_threads": 0}, "'num_threads' is 0; allowed: 1 to 1024"),
        ({"model": "m", "num_threads": -1}, "'num_threads' is -1; allowed: 1 to 1024"),
        ({"model": "m", "num_threads": 1025}, "'num_threads' is 1025; allowed: 1 to 1024"),
        ({"model": "m", "num_threads": 1.5}, "'num_threads' is 1.5; it must be an integer"),
        ({"model": "m", "quantization": "awq"}, "'quantization' is 'awq'; allowed: null, 'gguf' and 'int8'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(arguments)
    assert text in str(caught.value)


def test_types_of_the_kv_cache() -> None:
    for name in ("auto", "fp8", "fp8_e4m3", "int8"):
        assert resolve({"model": "m", "kv_cache_dtype": name}).kv_cache_dtype == name
    with pytest.raises(ConfigError, match=r"'kv_cache_dtype' is 'fp8_e5m2'; allowed: 'auto' .* and 'int8'"):
        resolve({"model": "m", "kv_cache_dtype": "fp8_e5m2"})


def test_dtypes_have_two_names_as_in_vllm() -> None:
    assert resolve({"model": "m", "dtype": "half"}).dtype == "float16"
    assert resolve({"model": "m", "dtype": "float"}).dtype == "float32"


def test_the_length_comes_from_the_model_and_cannot_exceed_it() -> None:
    assert resolve({"model": "m"}).for_model(512).max_model_len == 512
    assert resolve({"model": "m", "max_model_len": 100}).for_model(512).max_model_len == 100
    with pytest.raises(ConfigError, match="'max_model_len' is 600; the model takes at most 512 tokens"):
        resolve({"model": "m", "max_model_len": 600}).for_model(512)


def test_without_chunks_the_budget_must_hold_a_whole_prompt() -> None:
    config = resolve({"model": "m", "enable_chunked_prefill": False, "max_num_batched_tokens": 256})
    with pytest.raises(ConfigError, match=r"must hold a whole prompt: max_model_len \(512\) and more"):
        config.for_model(512)
    assert config.for_model(256).max_model_len == 256


def test_the_budget_of_a_step_holds_what_cannot_be_cut() -> None:
    assert resolve({"model": "m"}).for_model(4096).max_num_batched_tokens == 1024
    assert resolve({"model": "m", "max_num_seqs": 2000}).for_model(4096).max_num_batched_tokens == 2000
    whole = {"model": "m", "enable_chunked_prefill": False}
    assert resolve(whole).for_model(4096).max_num_batched_tokens == 4096
    assert resolve(whole).for_model(512).max_num_batched_tokens == 1024
    with pytest.raises(ConfigError, match=r"max_num_seqs \(2000\) to 1048576"):
        resolve({"model": "m", "max_num_seqs": 2000, "max_num_batched_tokens": 1024})
