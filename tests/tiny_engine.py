"""Engines on the model of `tiny`, for the tests that compare them with Transformers."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo import Engine
from octavo.protocol import StepPlan


def tiny_engine(folder: Path, **arguments: Any) -> Engine:
    """In float32, on one thread: the model is too small for more."""
    defaults = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 512}
    return Engine({"model": str(folder), "num_threads": 1, **defaults, **arguments})


@contextmanager
def whole(engine: Engine) -> Iterator[Engine]:
    """Checks in the end that the engine is sound and holds no block, and closes it."""
    yield engine
    engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    engine.close()


def preempt_every(engine: Engine, steps: int) -> None:
    """Throws the last in rank out before every so many steps, whatever blocks are free."""
    scheduler = engine._scheduler
    schedule, count = scheduler.schedule, itertools.count(1)

    def schedule_after_preempting() -> StepPlan | None:
        if next(count) % steps == 0 and scheduler._running:
            scheduler._preempt(scheduler._running.pop())
        return schedule()

    scheduler.schedule = schedule_after_preempting  # type: ignore[method-assign]


def continued(
    reference: Any, prompts: Sequence[list[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """The next tokens of each prompt by Transformers, greedily and past any end."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            **options,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs
