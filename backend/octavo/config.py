"""The engine's configuration: vLLM's argument names, one frozen object, built once by `resolve`.

What depends on the model, `max_model_len`, is filled in by the engine with `for_model`, once, before anything
else is built. What `auto` means is for the part that it concerns to say.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError
from octavo.values import suggestion

log = logging.getLogger("octavo")

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority", "sjf"]
PreemptionMode = Literal["auto", "swap", "recompute"]

# vLLM's arguments that change nothing here, by why. They are taken, and named once in the log.
_IGNORED_BECAUSE = {
    "the model's files are read as they are, from this machine": (
        "served_model_name trust_remote_code download_dir load_format revision code_revision hf_token "
        "hf_config_path config_format model_impl tokenizer_revision tokenizer_mode tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config model_loader_extra_config ignore_patterns "
        "use_tqdm_on_load pt_load_map_location safetensors_load_strategy max_parallel_loading_workers "
        "generation_config allowed_local_media_path allowed_media_domains"
    ),
    "logs and metrics are the server's": (
        "log_level logging_config log_config_file aggregate_engine_logging show_hidden_metrics_for_version "
        "collect_detailed_traces kv_cache_metrics cudagraph_metrics custom_histogram_buckets"
    ),
    "prompts are not logged unless enable_log_requests says so": "disable_log_requests",
    "it is about vLLM's own kernels and compiler": (
        "compilation_config optimization_level "
        "attention_backend attention_config kernel_config disable_cascade_attn disable_sliding_window "
        "max_paddings performance_mode"
    ),
    "CUDA graphs serve any context, at the sizes of 'cudagraph_capture_sizes'": (
        "max_seq_len_to_capture max_context_len_to_capture cuda_graph_sizes max_cudagraph_capture_size"
    ),
    "it is about vLLM's own processes": (
        "worker_use_ray engine_use_ray distributed_executor_backend ray_workers_use_nsight worker_cls "
        "worker_extension_cls disable_custom_all_reduce disable_async_output_proc "
        "disable_frontend_multiprocessing enable_sleep_mode "
        "master_addr master_port node_rank distributed_timeout_seconds numa_bind numa_bind_nodes"
    ),
    "the scheduler has no such switch": (
        "use_v2_block_manager num_scheduler_steps multi_step_stream_outputs num_lookahead_slots "
        "async_scheduling scheduler_delay_factor scheduler_cls "
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold watermark "
        "stream_interval prefix_caching_hash_algo disable_hybrid_kv_cache_manager"
    ),
    "the weights stay on the device": "cpu_offload_gb",
    "it matters with enable_lora only": (
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size fully_sharded_loras"
    ),
    "it matters for images, audio and video only": (
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb disable_mm_preprocessor_cache "
        "media_io_kwargs interleave_mm_strings skip_mm_profiling disable_chunked_mm_input"
    ),
    "a request says what it wants": (
        "max_logprobs guided_decoding_backend structured_outputs_config reasoning_parser"
    ),
}
IGNORED = {name: why for why, names in _IGNORED_BECAUSE.items() for name in names.split()}

# vLLM's arguments that change what is computed and that this version has no code for: they are taken with a
# value that asks for nothing, these and null, and refused with any other, for the reason given.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((False,), "LoRA adapters are not supported by this version"),
    "speculative_config": (({},), "speculative decoding is not supported by this version"),
    "speculative_model": ((), "speculative decoding is not supported by this version"),
    "num_speculative_tokens": ((0,), "speculative decoding is not supported by this version"),
    "hf_overrides": (({},), "the model is computed as its own configuration says"),
    "rope_scaling": (({},), "the model is computed as its own configuration says"),
    "rope_theta": ((), "the model is computed as its own configuration says"),
    "quantization_config": (({},), "name a scheme with 'quantization'"),
    "override_generation_config": (({},), "a request's own sampling parameters hold"),
    "logits_processors": (([],), "code of one's own is not run"),
    "logits_processor_pattern": ((), "code of one's own is not run"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are those of the model's own distribution"),
    "task": (("auto", "generate", "embed", "embedding"), "models generate and embed, nothing else"),
    "runner": (("auto", "generate", "pooling"), "models generate and embed, nothing else"),
    "convert": (("auto", "none", "embed"), "models generate and embed, nothing else"),
    "pooler_config": (({},), "a request says how it wants to be pooled"),
    "skip_tokenizer_init": ((False,), "texts are answered with texts"),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "data_parallel_size": ((1,), "several instances of the model, in config.pbtxt, do the same"),
    "decode_context_parallel_size": ((1,), "a model runs on one device in this version"),
    "prefill_context_parallel_size": ((1,), "a model runs on one device in this version"),
    "nnodes": ((1,), "a model runs on one device in this version"),
    "enable_expert_parallel": ((False,), "a model runs on one device in this version"),
    "kv_transfer_config": (({},), "KV blocks stay in their own instance"),
    "kv_offloading_size": ((0,), "KV blocks stay in their own instance"),
}


_TOKEN_BUDGET = 1024  # chosen in backend/docs/scheduling.md


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that an operator may set. Sizes in tokens unless the name says otherwise."""

    model: str  # a GGUF file, a Hugging Face folder, or pkg://PACKAGE/FILE inside an installed package
    tokenizer: str | None = None  # a folder with tokenizer.json; the model's own when None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None  # prompt and output together; the model's own limit when None
    block_size: int = 16
    max_num_seqs: int = 256  # it and others are chosen in backend/docs/scheduling.md
    max_num_batched_tokens: int | None = None  # 1024, and whatever must fit into one step, when None
    max_queue_size: int | None = None  # requests that may wait for their first step; no limit when None
    scheduling_policy: SchedulingPolicy = "priority"  # see engine/policy.py
    fair_scheduling: bool = False  # the line is taken by turns of tenants, each with its own by the policy
    target_itl_ms: float | None = None  # steps get the tokens that fit into it; see engine/pace.py
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None  # CPU: a quarter of the free memory, at most 4 GiB, when None
    num_gpu_blocks_override: int | None = None
    swap_space: float | None = None  # GiB of host memory for evicted KV blocks; None: 4 beside a GPU, else 0
    preemption_mode: PreemptionMode = "auto"  # whether they come back or are computed; engine/swap_choice.py
    enable_prefix_caching: bool = True
    prefix_cache_dir: str | None = None  # a folder for prefix blocks, found again after a restart; None: no
    prefix_cache_disk_gib: float = 10.0  # that it may take, whoever else uses it
    enable_chunked_prefill: bool = True
    seed: int | None = None  # for requests that bring none; from the system's entropy when None
    enforce_eager: bool = False  # on a GPU: no CUDA graphs for decode steps
    cudagraph_capture_sizes: tuple[int, ...] | None = None  # sequences; None: worker/cuda_graphs.py has them
    num_threads: int | None = None  # CPU threads of the forward; all cores it may use when None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"  # fp8 and int8 take half the memory of bfloat16, and a scale for each token
    disable_log_stats: bool = False  # no metrics of the engine
    enable_log_requests: bool = False  # a log line for each request, with its prompt
    max_log_len: int | None = None  # characters, or token ids, of a prompt in the log; all when None
    otlp_traces_endpoint: str | None = None  # where spans go, by OpenTelemetry's protocol; nowhere when None
    record_steps: str | None = None  # a folder: every step goes into a new file there, prompts with it
    record_steps_bytes: int = 2**30  # where such a file ends

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"'{name}' is {getattr(self, name)!r}; allowed: {allowed}", name)

        if isinstance(self.cudagraph_capture_sizes, list):  # as JSON has it
            object.__setattr__(self, "cudagraph_capture_sizes", tuple(self.cudagraph_capture_sizes))
        for name, hint in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), hint)
        require(bool(self.model), "model", "the path of a GGUF file or of a Hugging Face folder")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "2 and more")
        require(1 <= self.block_size <= 1024, "block_size", "1 to 1024")
        require(1 <= self.max_num_seqs <= 65536, "max_num_seqs", "1 to 65536")
        budget = self.max_num_batched_tokens
        require(
            budget is None or self.max_num_seqs <= budget <= 2**20,
            "max_num_batched_tokens",
            f"max_num_seqs ({self.max_num_seqs}) to {2**20}, so that every sequence can have a token a step",
        )
        require(self.max_queue_size is None or self.max_queue_size > 0, "max_queue_size", "1 and more")
        require(
            self.target_itl_ms is None or (self.target_itl_ms > 0 and self.enable_chunked_prefill),
            "target_itl_ms",
            "above 0, and null where enable_chunked_prefill is false: a prompt cannot be cut to fit then",
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
        require(
            self.swap_space is None or 0 <= self.swap_space <= 2**20, "swap_space", "0 to 1048576, in GiB"
        )
        require(
            self.prefix_cache_dir is None or re.fullmatch(r"/[^\0]*", self.prefix_cache_dir) is not None,
            "prefix_cache_dir",
            "the absolute path of a folder, which is made if need be",
        )
        require(
            self.prefix_cache_dir is None or self.enable_prefix_caching,
            "prefix_cache_dir",
            "null, since enable_prefix_caching is false: nothing would go there",
        )
        require(0 < self.prefix_cache_disk_gib <= 2**20, "prefix_cache_disk_gib", "above 0 and up to 1048576")
        sizes = self.cudagraph_capture_sizes
        require(
            sizes is None or (0 < len(sizes) <= 1000 and all(type(s) is int and s > 0 for s in sizes)),
            "cudagraph_capture_sizes",
            "a list of 1 to 1000 numbers of sequences, or 'enforce_eager': true for no graphs",
        )
        require(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", "1 to 1024")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            require(getattr(self, name) == 1, name, "1 in this version")
        require(self.quantization in (None, "gguf", "int8"), "quantization", "null, 'gguf' and 'int8'")
        require(
            self.kv_cache_dtype in ("auto", "fp8", "fp8_e4m3", "int8"),
            "kv_cache_dtype",
            "'auto' (the model's own type), 'fp8', 'fp8_e4m3' (the same) and 'int8'",
        )
        require(self.max_log_len is None or self.max_log_len >= 0, "max_log_len", "0 and more")
        require(
            self.otlp_traces_endpoint != "", "otlp_traces_endpoint", "a URL, such as http://localhost:4317"
        )
        require(
            self.record_steps is None or (self.record_steps != "" and self.prefix_cache_dir is None),
            "record_steps",
            "a folder, and null where prefix_cache_dir is set: what comes from there would not be recorded",
        )
        require(self.record_steps_bytes > 0, "record_steps_bytes", "1 and more")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens` of a complete configuration."""
        assert self.max_num_batched_tokens is not None, "for_model fills it in"
        return self.max_num_batched_tokens

    def for_model(self, max_positions: int) -> "EngineConfig":
        """The same, complete: with `max_model_len` and `max_num_batched_tokens` known. Raises `ConfigError`
        when the model's limit is exceeded."""
        if self.max_model_len is not None and self.max_model_len > max_positions:
            raise ConfigError(
                f"'max_model_len' is {self.max_model_len}; the model takes at most {max_positions} tokens",
                "max_model_len",
            )
        length = self.max_model_len or max_positions
        whole = 1 if self.enable_chunked_prefill else length  # tokens that cannot be cut
        budget = self.max_num_batched_tokens or max(_TOKEN_BUDGET, self.max_num_seqs, whole)
        if budget < whole:
            raise ConfigError(
                f"'max_num_batched_tokens' is {budget}; while enable_chunked_prefill is false it must hold a "
                f"whole prompt: max_model_len ({length}) and more",
                "max_num_batched_tokens",
            )
        return dataclasses.replace(self, max_model_len=length, max_num_batched_tokens=budget)


_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}
_SWITCHES = {name for name, hint in get_type_hints(EngineConfig).items() if hint is bool}

_TYPE_NAMES = {int: "an integer", str: "a string", bool: "true or false", float: "a number", tuple: "a list"}


@dataclass(frozen=True, slots=True)
class SortedArguments:
    """Engine arguments by what becomes of them; those that are not honoured with the reason, by name."""

    honoured: dict[str, Any]
    ignored: dict[str, str]
    refused: dict[str, str]

    def config(self) -> EngineConfig:
        """Of what is honoured. Raises `ConfigError` for a value, or when there is no model."""
        if "model" not in self.honoured:
            raise ConfigError(
                "'model' is missing: the path of a GGUF file or of a Hugging Face folder", "model"
            )
        return EngineConfig(**self.honoured)


def sort_arguments(arguments: Mapping[str, Any]) -> SortedArguments:
    """Sorts engine arguments, as they stand in `model.json`, by their names; `EngineConfig` checks the values
    of those that are honoured. Null is what vLLM's arguments are when they are left out."""
    honoured: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    refused: dict[str, str] = {}
    for key, value in arguments.items():
        if key in IGNORED:
            ignored[key] = IGNORED[key]
        elif value is None and (key in NEUTRAL or key in _FIELDS):
            ignored[key] = "null stands for the default"
        elif key in NEUTRAL:
            allowed, why = NEUTRAL[key]
            if value in allowed or (False in allowed and str(value).lower() == "false"):
                ignored[key] = "it asks for nothing"
            else:
                refused[key] = f"'{key}' is {repr(value)[:80]}: {why}; allowed: {_listed(allowed)}"
        elif key in _FIELDS:
            honoured[key] = _switch(value) if key in _SWITCHES else value
        else:
            refused[key] = f"unknown engine argument '{key}'; {suggestion(key, _FIELDS)}"
    if honoured.get("dtype") in ("half", "float"):  # vLLM's other names for two of them
        honoured["dtype"] = {"half": "float16", "float": "float32"}[honoured["dtype"]]
    if honoured.get("enable_log_requests") is True and _switch(arguments.get("disable_log_requests")) is True:
        del honoured["enable_log_requests"]
        refused["enable_log_requests"] = (
            "'enable_log_requests' and 'disable_log_requests' are both true; leave one of them out"
        )
    return SortedArguments(honoured, ignored, refused)


def resolve(arguments: Mapping[str, Any]) -> EngineConfig:
    """Checks engine arguments, as they stand in `model.json`, and returns the configuration.

    Raises `ConfigError` that names an unknown key and the nearest known one, or a value and what is allowed.
    """
    parts = sort_arguments(arguments)
    if parts.ignored:
        log.info("engine arguments that change nothing here: %s", ", ".join(sorted(parts.ignored)))
    for key, why in parts.refused.items():
        raise ConfigError(why, key)
    return parts.config()


def _switch(value: Any) -> Any:
    """Repositories of Triton's vLLM backend have "true" for true."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _listed(values: tuple[Any, ...]) -> str:
    """As they are written in JSON, null among them."""
    return " and ".join(json.dumps(value) for value in (*values, None))


def _check_type(name: str, value: Any, hint: Any) -> None:
    if isinstance(hint, UnionType):
        if value is None:
            return
        hint = next(h for h in get_args(hint) if h is not type(None))
    choices = get_args(hint)
    if get_origin(hint) is tuple:
        hint = tuple
    elif choices:
        if value not in choices:
            raise ConfigError(f"'{name}' is {value!r}; allowed: {', '.join(choices)}", name)
        return
    if hint is float and type(value) is int:
        return
    if type(value) is not hint:
        raise ConfigError(f"'{name}' is {value!r}; it must be {_TYPE_NAMES[hint]}", name)
