"""Which metrics there are: name, help, labels, buckets, and how the value is read. Data for `triton_metrics`.

Names beginning with `vllm:` are those of Triton's vLLM backend and of vLLM itself; `nv_trt_llm_` are read by
Triton for its ORCA header and by Kubernetes' inference gateway; what has no name there is `octavo:`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from octavo.engine.metrics import EngineStats, Step
from octavo.request import RequestStats, SamplingParams
from octavo.serving.ended_request import EndedRequest

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Series(Generic[Subject]):
    """One time series. `value` is None where a subject has no such value; `buckets` are a histogram's."""

    name: str
    help: str
    value: Callable[[Subject], float | None]
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What gauges and counters are read from."""

    engine: EngineStats
    ready: bool
    num_coalesced: int
    refused: Mapping[str, int]  # by code: requests that ended in an error before the engine had them
    failed: Mapping[str, int]  # by code: those that ended in an error later


def _of_cache(type: str, value: Callable[[EngineStats], float]) -> Series[Snapshot]:
    return Series(
        "nv_trt_llm_kv_cache_block_metrics",
        "KV blocks, by TensorRT-LLM's names.",
        lambda now: value(now.engine),
        {"kv_cache_block_type": type},
    )


def _of_requests(type: str, value: Callable[[EngineStats], float]) -> Series[Snapshot]:
    return Series(
        "nv_trt_llm_request_metrics",
        "Requests, by TensorRT-LLM's names.",
        lambda now: value(now.engine),
        {"request_type": type},
    )


def _usage(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks


def _hit_rate(stats: EngineStats) -> float:
    return stats.prefix_hits_total / stats.prefix_queries_total if stats.prefix_queries_total else 0.0


GAUGES: tuple[Series[Snapshot], ...] = (
    Series("octavo:ready", "1 while the model takes requests, else 0.", lambda now: now.ready),
    Series("vllm:num_requests_running", "Sequences in the batch.", lambda now: now.engine.num_running),
    Series(
        "vllm:num_requests_waiting",
        "Requests that wait for their first step.",
        lambda now: now.engine.num_waiting,
    ),
    Series(
        "vllm:kv_cache_usage_perc",
        "KV blocks in use by sequences; 1 is all of them.",
        lambda now: _usage(now.engine),
    ),
    Series(
        "vllm:gpu_cache_usage_perc",
        "The same, by its older name, whatever the device.",
        lambda now: _usage(now.engine),
    ),
    Series("octavo:kv_blocks", "KV blocks that there are.", lambda now: now.engine.num_blocks),
    Series("octavo:kv_blocks_used", "KV blocks that sequences hold.", lambda now: now.engine.num_used_blocks),
    Series(
        "octavo:kv_blocks_cached",
        "KV blocks that a prompt with the same prefix can reuse, held or not.",
        lambda now: now.engine.num_cached_blocks,
    ),
    Series(
        "octavo:kv_blocks_reusable",
        "Of those, the ones that no sequence holds.",
        lambda now: now.engine.num_reusable_blocks,
    ),
    Series(
        "octavo:kv_blocks_shared",
        "KV blocks that several sequences hold.",
        lambda now: now.engine.num_shared_blocks,
    ),
    Series(
        "octavo:host_blocks",
        "Slots of host memory for evicted KV blocks.",
        lambda now: now.engine.num_host_blocks,
    ),
    Series(
        "octavo:host_blocks_used", "Of those, the ones in use.", lambda now: now.engine.num_used_host_blocks
    ),
    Series(
        "octavo:prefix_cache_hit_rate",
        "Share of prompt tokens found in the prefix cache, since the start.",
        lambda now: _hit_rate(now.engine),
    ),
    _of_cache("max", lambda stats: stats.num_blocks),
    _of_cache("used", lambda stats: stats.num_used_blocks),
    _of_cache("free", lambda stats: stats.num_blocks - stats.num_used_blocks),
    _of_cache("tokens_per", lambda stats: stats.block_size),
    _of_cache("fraction", _usage),
    _of_requests("waiting", lambda stats: stats.num_waiting),
    _of_requests("scheduled", lambda stats: stats.num_running),
)


def _count(
    name: str, help: str, counts: Callable[[Snapshot], Mapping[str, int]], label: str, value: str
) -> Series[Snapshot]:
    """One of `counts`, which are by the values of the label."""
    return Series(name, help, lambda now: counts(now).get(value, 0), {label: value})


def _finished(name: str, reason: str) -> Series[Snapshot]:
    help = "Requests that ended after the engine had them, by how."
    return _count(name, help, lambda now: now.engine.requests_finished, "finished_reason", reason)


def _refused(code: str) -> Series[Snapshot]:
    help = "Requests that were answered with an error before the engine had them, by its code."
    return _count("octavo:refused_requests_total", help, lambda now: now.refused, "code", code)


def _failed(code: str) -> Series[Snapshot]:
    help = "Requests that the engine had and that were answered with an error, by its code."
    return _count("octavo:failed_requests_total", help, lambda now: now.failed, "code", code)


_REASONS = ("stop", "length", "abort", "error")
_CODES = ("INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL")

COUNTERS: tuple[Series[Snapshot], ...] = (
    Series(
        "vllm:prompt_tokens_total",
        "Prompt tokens of accepted requests.",
        lambda now: now.engine.prompt_tokens_total,
    ),
    Series(
        "vllm:generation_tokens_total", "Tokens generated.", lambda now: now.engine.generation_tokens_total
    ),
    Series(
        "vllm:num_preemptions_total",
        "Sequences put back for want of KV blocks.",
        lambda now: now.engine.preemptions_total,
    ),
    Series(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda now: now.engine.prefix_queries_total,
    ),
    Series(
        "vllm:prefix_cache_hits_total",
        "Prompt tokens found there.",
        lambda now: now.engine.prefix_hits_total,
    ),
    Series(
        "octavo:prefix_cache_host_hits_total",
        "Of those, the ones that were copied from host memory.",
        lambda now: now.engine.host_hits_total,
    ),
    Series(
        "octavo:swap_out_bytes_total",
        "Copied from the KV cache to host memory.",
        lambda now: now.engine.swapped_out_bytes_total,
    ),
    Series(
        "octavo:swap_in_bytes_total",
        "Copied back from there.",
        lambda now: now.engine.swapped_in_bytes_total,
    ),
    Series(
        "octavo:prefix_cache_disk_hits_total",
        "Of the prompt tokens found, the ones that came from the prefix cache's directory.",
        lambda now: now.engine.disk_hits_total,
    ),
    Series(
        "octavo:disk_load_bytes_total",
        "Copied to the KV cache from that directory.",
        lambda now: now.engine.disk_loaded_bytes_total,
    ),
    Series(
        "octavo:disk_save_bytes_total",
        "Written to files there.",
        lambda now: now.engine.disk_saved_bytes_total,
    ),
    Series(
        "octavo:disk_dropped_blocks_total",
        "KV blocks that were not written there, since the disk was behind or refused.",
        lambda now: now.engine.disk_dropped_blocks_total,
    ),
    Series(
        "octavo:disk_damaged_files_total",
        "Files there that were damaged, and were deleted.",
        lambda now: now.engine.disk_damaged_files_total,
    ),
    *(_finished("vllm:request_success_total", reason) for reason in _REASONS),
    *(_finished("octavo:finished_requests_total", reason) for reason in _REASONS),
    *map(_refused, _CODES),
    *map(_failed, _CODES),
    Series(
        "octavo:preemptions_total",
        "Sequences put back for want of KV blocks.",
        lambda now: now.engine.preemptions_total,
    ),
    Series(
        "octavo:block_copies_total",
        "KV blocks copied, since several sequences shared one that was not full, and one had to write to it.",
        lambda now: now.engine.block_copies_total,
    ),
    Series("octavo:steps_total", "Steps of the model.", lambda now: now.engine.steps_total),
    Series("octavo:step_seconds_total", "Time spent in them.", lambda now: now.engine.step_s_total),
    Series(
        "octavo:forward_seconds_total",
        "Of that, until the hidden states were there; on a GPU, until they were queued.",
        lambda now: now.engine.forward_s_total,
    ),
    Series(
        "octavo:sampling_seconds_total",
        "Of that, from there until the tokens were.",
        lambda now: now.engine.sample_s_total,
    ),
    Series(
        "octavo:coalesced_responses_total",
        "Deltas of streams that were sent in an earlier one's response.",
        lambda now: now.num_coalesced,
    ),
)

# From a GPU's tenths of a millisecond to what a large model takes on a CPU.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5),
)
_LATENCY_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920),
)
_STEP_S = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 30),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_POWERS = tuple(float(2**power) for power in range(15))
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def _time(name: str, help: str, value: Callable[[RequestStats], float]) -> Series[EndedRequest]:
    """Of the engine's own account of a request's time, which not every request has."""
    return Series(
        name,
        help,
        lambda done: None if done.stats is None else value(done.stats),
        buckets=_SECONDS,
    )


def _params(done: EndedRequest) -> SamplingParams:
    assert done.request.reply is not None
    return done.request.reply.params


REQUEST_HISTOGRAMS: tuple[Series[EndedRequest], ...] = (
    Series(
        "vllm:time_to_first_token_seconds",
        "From the request's arrival to its first token being sent.",
        lambda done: done.time_to_first_token_s,
        buckets=_FIRST_TOKEN_S,
    ),
    Series(
        "vllm:time_per_output_token_seconds",
        "A request's mean time from one token of a sequence to the next.",
        lambda done: done.time_per_token_s,
        buckets=_TOKEN_S,
    ),
    Series(
        "vllm:e2e_request_latency_seconds",
        "From the request's arrival to its final response being sent.",
        lambda done: done.latency_s,
        buckets=_LATENCY_S,
    ),
    _time(
        "vllm:request_queue_time_seconds",
        "From the request's arrival to its first step.",
        lambda stats: stats.queue_s,
    ),
    _time(
        "octavo:queue_time_seconds",
        "From the request's arrival to its first step.",
        lambda stats: stats.queue_s,
    ),
    _time(
        "vllm:request_prefill_time_seconds",
        "From its first step to its first token.",
        lambda stats: stats.prefill_s,
    ),
    _time(
        "vllm:request_decode_time_seconds",
        "From its first token to its last.",
        lambda stats: stats.decode_s,
    ),
    _time(
        "vllm:request_inference_time_seconds",
        "From its first step to its last token.",
        lambda stats: stats.prefill_s + stats.decode_s,
    ),
    Series(
        "vllm:request_prompt_tokens",
        "Tokens of a request's prompt.",
        lambda done: done.num_prompt_tokens,
        buckets=_TOKENS,
    ),
    Series(
        "vllm:request_generation_tokens",
        "Tokens generated for a request, of all its sequences.",
        lambda done: done.request.num_tokens,
        buckets=_TOKENS,
    ),
    Series(
        "vllm:request_params_n",
        "The sampling parameter n.",
        lambda done: _params(done).n,
        buckets=_FEW,
    ),
    Series(
        "vllm:request_params_best_of",
        "The sampling parameter best_of; n where it is not given.",
        lambda done: _params(done).best_of or _params(done).n,
        buckets=_FEW,
    ),
    Series(
        "vllm:request_params_max_tokens",
        "The sampling parameter max_tokens.",
        lambda done: _params(done).max_tokens,
        buckets=_TOKENS,
    ),
)

STEP_HISTOGRAMS: tuple[Series[Step], ...] = (
    Series(
        "vllm:iteration_tokens_total",
        "Tokens that a step computes.",
        lambda step: step.num_tokens,
        buckets=_POWERS,
    ),
    Series(
        "octavo:step_time_seconds",
        "What a step takes. Of more than a hundred in a second, only so many are counted.",
        lambda step: step.duration_s,
        buckets=_STEP_S,
    ),
    Series(
        "octavo:batch_size",
        "Sequences in a step.",
        lambda step: step.num_sequences,
        buckets=_POWERS,
    ),
)
