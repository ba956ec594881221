"""The claim `waste`: how much of the allocated KV memory holds a token, and how many requests it lets run.

Simulated, by the mixed trace: pre-allocated at the maximum length against paged, in the same bytes.
"""

from dataclasses import replace

from claim import Bar, Claim, Panel, Result, markdown
from octavo.config import EngineConfig
from roofline import CARDS, SHAPES
from simulate import Replay
from simulation_report import Report
from traces import MIXED, load

GOAL = 0.96  # of the allocated memory holds tokens
MAX_MODEL_LEN = 2048
REQUESTS_AT_MOST_LENGTH = 64  # that the cache is given room for

_HEADER = ("KV cache", "holds tokens", "requests at once", "times as many", "output tokens/s", "preemptions")


def reports() -> dict[str, Report]:
    """Pre-allocated, paged, and paged with shared prefixes: the mixed trace, all in line from the start, in
    the same bytes of KV cache."""
    trace = [replace(request, arrival_s=0.0) for request in load(MIXED)]
    num_tokens = REQUESTS_AT_MOST_LENGTH * MAX_MODEL_LEN

    def replayed(block_size: int, *, caching: bool, more_blocks: int = 0) -> Report:
        config = EngineConfig(
            model="none",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1024,
            max_num_batched_tokens=2048,
            enable_prefix_caching=caching,
            seed=0,
        )
        num_blocks = num_tokens // block_size + more_blocks
        return Replay(config, CARDS["h100"], SHAPES["llama-8b"], num_blocks, block_size).run(trace)

    return {
        # One more, since admission leaves a block free for others to grow into, and here nobody grows.
        "pre-allocated at maximum length": replayed(MAX_MODEL_LEN, caching=False, more_blocks=1),
        "paged, blocks of 16": replayed(16, caching=False),
        "paged, prefixes shared": replayed(16, caching=True),
    }


def measure() -> Result:
    measured = reports()
    base, *paged = measured.values()
    at_once = {label: report.running_when_full or report.running for label, report in measured.items()}
    holding = [Bar(label, r.kv_holding, f"{r.kv_holding:.1%}", r is base) for label, r in measured.items()]
    running = [Bar(label, n, f"{n:.0f}", measured[label] is base) for label, n in at_once.items()]
    rows = [
        (
            label,
            f"{report.kv_holding:.1%}",
            f"{at_once[label]:.0f}",
            f"{at_once[label] / running[0].value:.1f}",
            f"{report.output_tokens_per_s:,.0f}",
            f"{report.preemptions}",
        )
        for label, report in measured.items()
    ]
    panels = Panel("KV memory that holds tokens", tuple(holding)), Panel("requests at once", tuple(running))
    return Result(markdown(_HEADER, rows), all(r.kv_holding >= GOAL for r in paged), panels)


WASTE = Claim(measure, exact=True)
