"""What of a server's metrics a report shows over time. `load_sender.py` samples it, `load_report.py` draws
it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# By what it is here: names in the order of preference, Octavo's first, then what vLLM has as well.
GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "blocks": ("octavo:kv_blocks",),
    "blocks_used": ("octavo:kv_blocks_used",),
    "blocks_cached": ("octavo:kv_blocks_cached",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions_total": ("vllm:num_preemptions_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    "prefix_queries_total": ("vllm:prefix_cache_queries_total",),
    "prefix_hits_total": ("vllm:prefix_cache_hits_total",),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """`at_s` after the test's begin; `values` by the keys of GAUGES, those that the server has."""

    at_s: float
    values: Mapping[str, float]


def series(moments: Sequence[Moment], key: str) -> list[tuple[float, float]]:
    """(at_s, value) of one gauge."""
    return [(moment.at_s, moment.values[key]) for moment in moments if key in moment.values]


def rates(moments: Sequence[Moment], key: str) -> list[tuple[float, float]]:
    """(at_s, per second) of a counter. A counter that fell was a server's restart: nothing there."""
    points = series(moments, key)
    return [
        (now_s, (now - before) / (now_s - before_s))
        for (before_s, before), (now_s, now) in pairwise(points)
        if now >= before and now_s > before_s
    ]


def growth(moments: Sequence[Moment], key: str) -> float | None:
    """Of a counter over the whole test."""
    points = series(moments, key)
    return points[-1][1] - points[0][1] if len(points) > 1 else None
