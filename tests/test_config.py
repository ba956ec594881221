"""Engine arguments: vLLM's names, and a clear word for everything that is wrong."""

import logging
from typing import Any

import pytest

from octavo.config import resolve
from octavo.errors import ConfigError


def test_names_and_defaults_are_those_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo"):
        config = resolve({"model": "m", "disable_log_stats": True, "enforce_eager": True, "max_num_seqs": 4})
    assert (config.model, config.max_num_seqs, config.block_size) == ("m", 4, 16)
    assert "disable_log_stats, enforce_eager" in caplog.text


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
        ({"model": "m", "block_size": "16"}, "'block_size' is '16'; it must be an integer"),
        ({"model": "m", "block_size": True}, "'block_size' is True; it must be an integer"),
        (
            {"model": "m", "max_num_batched_tokens": 8},
            "'max_num_batched_tokens' is 8; allowed: max_num_seqs (128)",
        ),
        (
            {"model": "m", "tensor_parallel_size": 2},
            "'tensor_parallel_size' is 2; allowed: 1 in this version",
        ),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "'gpu_memory_utilization' is 1.5; allowed: above 0"),
        ({"model": "m", "kv_cache_memory_bytes": 0}, "'kv_cache_memory_bytes' is 0; allowed: 1 and more"),
        ({"model": "m", "max_model_len": 1}, "'max_model_len' is 1; allowed: 2 and more"),
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
