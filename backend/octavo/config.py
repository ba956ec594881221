"""The engine's configuration: vLLM's argument names, one frozen object, built once by `resolve`.

What depends on the model, `max_model_len`, is filled in by the engine with `for_model`, once, before anything
else is built. What `auto` means is for the part that it concerns to say.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

from octavo.errors import ConfigError

log = logging.getLogger("octavo")

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

# vLLM's arguments that mean nothing here. They are taken and named once in the log.
IGNORED = frozenset(
    "served_model_name disable_log_requests disable_log_stats trust_remote_code enforce_eager "
    "worker_use_ray engine_use_ray "
    "distributed_executor_backend max_seq_len_to_capture use_v2_block_manager num_scheduler_steps "
    "multi_step_stream_outputs disable_custom_all_reduce download_dir load_format revision code_revision "
    "tokenizer_revision tokenizer_mode tokenizer_pool_size swap_space cpu_offload_gb preemption_mode "
    "max_paddings max_context_len_to_capture enable_log_requests async_scheduling compilation_config".split()
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an operator may set. Sizes in tokens unless the name says otherwise."""

    model: str  # a GGUF file, a Hugging Face folder, or pkg://PACKAGE/FILE inside an installed package
    tokenizer: str | None = None  # a folder with tokenizer.json; the model's own when None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None  # prompt and output together; the model's own limit when None
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None  # CPU: a quarter of the free memory, at most 4 GiB, when None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int | None = None  # for requests that bring none; from the system's entropy when None
    num_threads: int | None = None  # CPU threads of the forward; all cores it may use when None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"'{name}' is {getattr(self, name)!r}; allowed: {allowed}")

        for name, hint in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), hint)
        require(bool(self.model), "model", "the path of a GGUF file or of a Hugging Face folder")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "2 and more")
        require(1 <= self.block_size <= 1024, "block_size", "1 to 1024")
        require(1 <= self.max_num_seqs <= 65536, "max_num_seqs", "1 to 65536")
        require(
            self.max_num_seqs <= self.max_num_batched_tokens <= 2**20,
            "max_num_batched_tokens",
            f"max_num_seqs ({self.max_num_seqs}) to {2**20}, so that every sequence can have a token a step",
        )
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "above 0 and up to 1")
        require(
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
            "kv_cache_memory_bytes",
            "1 and more",
        )
        require(
            self.num_gpu_blocks_override is None or self.num_gpu_blocks_override > 0,
            "num_gpu_blocks_override",
            "1 and more",
        )
        require(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", "1 to 1024")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            require(getattr(self, name) == 1, name, "1 in this version")
        require(self.quantization in (None, "gguf", "int8"), "quantization", "null, 'gguf' and 'int8'")
        require(self.kv_cache_dtype == "auto", "kv_cache_dtype", "'auto' in this version")

    def for_model(self, max_positions: int) -> "EngineConfig":
        """The same, with `max_model_len` known. Raises `ConfigError` when the model's limit is exceeded."""
        if self.max_model_len is not None and self.max_model_len > max_positions:
            raise ConfigError(
                f"'max_model_len' is {self.max_model_len}; the model takes at most {max_positions} tokens"
            )
        length = self.max_model_len or max_positions
        config = dataclasses.replace(self, max_model_len=length)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < length:
            raise ConfigError(
                f"'max_num_batched_tokens' is {self.max_num_batched_tokens}; while enable_chunked_prefill is "
                f"false it must hold a whole prompt: max_model_len ({length}) and more"
            )
        return config


_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}

_TYPE_NAMES = {int: "an integer", str: "a string", bool: "true or false", float: "a number"}


def resolve(arguments: Mapping[str, Any]) -> EngineConfig:
    """Checks engine arguments, as they stand in `model.json`, and returns the configuration.

    Raises `ConfigError` that names an unknown key and the nearest known one, or a value and what is allowed.
    """
    ignored = sorted(key for key in arguments if key in IGNORED)
    if ignored:
        log.info("engine arguments that Octavo has no use for: %s", ", ".join(ignored))
    values = {key: value for key, value in arguments.items() if key not in IGNORED}
    if values.get("dtype") in ("half", "float"):  # vLLM's other names for two of them
        values["dtype"] = {"half": "float16", "float": "float32"}[values["dtype"]]
    for key in values:
        if key not in _FIELDS:
            near = get_close_matches(key, _FIELDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(_FIELDS))}"
            raise ConfigError(f"unknown engine argument '{key}'; {hint}")
    if "model" not in values:
        raise ConfigError("'model' is missing: the path of a GGUF file or of a Hugging Face folder")
    return EngineConfig(**values)


def _check_type(name: str, value: Any, hint: Any) -> None:
    if isinstance(hint, UnionType):
        if value is None:
            return
        hint = next(h for h in get_args(hint) if h is not type(None))
    choices = get_args(hint)
    if choices:
        if value not in choices:
            raise ConfigError(f"'{name}' is {value!r}; allowed: {', '.join(choices)}")
        return
    if hint is float and type(value) is int:
        return
    if type(value) is not hint:
        raise ConfigError(f"'{name}' is {value!r}; it must be {_TYPE_NAMES[hint]}")
