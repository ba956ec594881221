"""What two readings of a server's metrics say of its models between them. Values only; `top` shows them.

Understands Octavo's series and, as far as they go, those of Triton's vLLM backend (`vllm:` only).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from octavo_client._metrics import Metrics, Sample

# By what they tell, the names that it goes by: the first that a server has counts.
_TTFT = ("vllm:time_to_first_token_seconds",)
_ITL = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
)
_QUEUE = ("vllm:request_queue_time_seconds", "octavo:queue_time_seconds")
_TOKENS_IN, _TOKENS_OUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_PREEMPTIONS = ("octavo:preemptions_total", "vllm:num_preemptions_total")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_BLOCKS = "octavo:kv_blocks"  # and, after an underscore, the kinds of them


@dataclass(frozen=True, slots=True)
class Quantiles:
    """In ms, from a histogram's buckets: no more exact than these. None where nothing was counted."""

    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a model now; `name` is "" where a model has one. None for what a server does not say.

    `blocks` are KV blocks by kind: "total", "used", "free", "cached" and what else there is.
    """

    name: str
    ready: bool | None
    running: int | None
    waiting: int | None
    kv_usage: float | None  # 0 to 1
    blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model: its instances now, and what it did in the window. None where it is not known: a server does
    not have the series, or there was no earlier reading."""

    name: str
    version: str
    instances: tuple[Instance, ...]
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    ttft: Quantiles
    itl: Quantiles
    queue: Quantiles
    prefix_hit_rate: float | None
    preemptions: int | None  # in the window
    preemptions_total: int | None
    outcomes: Mapping[str, int] = field(default_factory=dict)  # requests in the window
    outcomes_total: Mapping[str, int] = field(default_factory=dict)


def views(before: Metrics | None, now: Metrics, seconds: float) -> list[ModelView]:
    """Of each model that has a `vllm:` series. `seconds`: between the readings."""
    models = {
        (name, sample.labels.get("version", ""))
        for sample in now
        if sample.name.startswith("vllm:") and (name := _model_of(sample)) is not None
    }
    return [_view(name, version, before, now, seconds) for name, version in sorted(models)]


def _view(name: str, version: str, before: Metrics | None, now: Metrics, seconds: float) -> ModelView:
    window = _Window(
        None if before is None else _of_model(before, name, version), _of_model(now, name, version), seconds
    )
    queries = window.increase("vllm:prefix_cache_queries_total")
    hits = window.increase("vllm:prefix_cache_hits_total")
    preemptions = _first(window.total, _PREEMPTIONS)
    return ModelView(
        name,
        version,
        _instances(window.now),
        window.rate(_TOKENS_IN),
        window.rate(_TOKENS_OUT),
        window.quantiles(_TTFT),
        window.quantiles(_ITL),
        window.quantiles(_QUEUE),
        hits / queries if hits is not None and queries else None,
        _whole(_first(window.increase, _PREEMPTIONS)),
        _whole(preemptions),
        window.outcomes(increase=True),
        window.outcomes(increase=False),
    )


def _of_model(metrics: Metrics, name: str, version: str) -> list[Sample]:
    return [
        sample
        for sample in metrics
        if _model_of(sample) == name and sample.labels.get("version", "") == version
    ]


def _model_of(sample: Sample) -> str | None:
    return sample.labels.get("model", sample.labels.get("model_name"))  # the second is vLLM's own


class _Window:
    """Counters and histograms between two readings. A counter that fell was begun anew by a restart."""

    def __init__(self, before: list[Sample] | None, now: list[Sample], seconds: float) -> None:
        self.now = now
        self._before = None if before is None else {_key(sample): sample.value for sample in before}
        self._seconds = seconds

    def total(self, name: str) -> float | None:
        return _sum(sample.value for sample in self.now if sample.name == name)

    def increase(self, name: str) -> float | None:
        if self._before is None:
            return None
        return _sum(self._increase(sample) for sample in self.now if sample.name == name)

    def rate(self, name: str) -> float | None:
        increase = self.increase(name)
        return None if increase is None or self._seconds <= 0 else increase / self._seconds

    def quantiles(self, names: Iterable[str]) -> Quantiles:
        for name in names:
            found = [sample for sample in self.now if sample.name == f"{name}_bucket"]
            if found:
                counts: dict[float, float] = {}  # cumulative, by upper bound
                for sample in found if self._before is not None else ():
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + self._increase(sample)
                return Quantiles(_quantile(counts, 0.5), _quantile(counts, 0.99))
        return Quantiles(None, None)

    def outcomes(self, *, increase: bool) -> dict[str, int]:
        """Requests by how they ended; Triton's own two counters where the model has none of its own."""
        if increase and self._before is None:
            return {}
        found: dict[str, float] = {}
        for sample in self.now:
            outcome = _outcome(sample)
            if outcome is not None:
                found[outcome] = found.get(outcome, 0) + (
                    self._increase(sample) if increase else sample.value
                )
        if not found:
            for name, outcome in (
                ("nv_inference_request_success", "ok"),
                ("nv_inference_request_failure", "failed"),
            ):
                count = self.increase(name) if increase else self.total(name)
                if count is not None:
                    found[outcome] = count
        return {outcome: round(count) for outcome, count in found.items()}

    def _increase(self, sample: Sample) -> float:
        assert self._before is not None
        before = self._before.get(_key(sample), 0.0)
        return sample.value if sample.value < before else sample.value - before


def _outcome(sample: Sample) -> str | None:
    if sample.name == "vllm:request_success_total":
        return sample.labels.get("finished_reason")
    if sample.name == "octavo:refused_requests_total":
        return f"refused {sample.labels.get('code', '')}"
    if sample.name == "octavo:failed_requests_total":
        return f"failed {sample.labels.get('code', '')}"
    return None


def _instances(now: list[Sample]) -> tuple[Instance, ...]:
    gauges = [sample for sample in now if sample.name.startswith(("vllm:", "octavo:"))]
    named = sorted({sample.labels["instance"] for sample in gauges if "instance" in sample.labels})
    return tuple(
        _instance(name, [sample for sample in gauges if sample.labels.get("instance", "") == name])
        for name in (named or [""])
    )


def _instance(name: str, gauges: list[Sample]) -> Instance:
    def value(*names: str) -> float | None:
        return _first(lambda one: _sum(gauge.value for gauge in gauges if gauge.name == one), names)

    ready = value("octavo:ready")
    return Instance(
        name,
        None if ready is None else ready == 1,
        _whole(value("vllm:num_requests_running")),
        _whole(value("vllm:num_requests_waiting")),
        value(*_USAGE),
        _blocks(gauges),
    )


def _blocks(gauges: list[Sample]) -> dict[str, int]:
    """`octavo:kv_blocks` is the total, `octavo:kv_blocks_KIND` and the label `kind` are kinds."""
    found: dict[str, int] = {}
    for gauge in gauges:
        suffix = gauge.name.removeprefix(_BLOCKS)
        if gauge.name.startswith(_BLOCKS) and (not suffix or suffix[0] == "_"):
            kind = gauge.labels.get("kind") or suffix[1:] or "total"
            found[kind] = round(gauge.value)
    if "free" not in found and found.keys() >= {"total", "used"}:
        found["free"] = found["total"] - found["used"]
    return found


def _quantile(counts: Mapping[float, float], share: float) -> float | None:
    """In ms, of seconds: as if spread evenly between two bounds; the last finite one for what is beyond."""
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= share * total:
            if math.isinf(bound):
                return lower * 1000
            within = (share * total - below) / (count - below) if count > below else 1.0
            return (lower + (bound - lower) * within) * 1000
        lower, below = bound, count
    return lower * 1000


def _key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.name, tuple(sorted(sample.labels.items()))


def _sum(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) if found else None


def _first(ask: Callable[[str], float | None], names: Iterable[str]) -> float | None:
    """The answer about the first name that has one."""
    return next((value for value in map(ask, names) if value is not None), None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
