"""A snapshot of the engine in numbers, for whoever exports metrics. Any thread may take one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they are, and totals since the start. Prefix queries and hits are counted in tokens."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    requests_finished: dict[str, int]  # by how they ended: stop, length, abort, error
