"""Hidden states to tokens, for all sequences of a step at once.

All logits are only computed where somebody needs more than the best few of them, or edits them.

A draw is determined by the sequence's seed and the position of the new token, by a counter-based hash. So a
seeded sample is the same whatever else is in the batch, after a preemption, and after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import RowSampling, TokenLogprobs
from octavo.worker.logit_edits import LogitEdits, edited
from octavo_kernels import ops

# Above, writing all logits is cheaper: 64 best of 49152 cost a millisecond more than one, at 32 rows.
_MOST_CANDIDATES = 64

# One sequence's sampling parameters, as the columns of an array.
SETTINGS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("wants_logprobs", np.bool_),
        ("num_logprobs", np.int64),
    ]
)


def settings_of(sampling: RowSampling) -> tuple[float | int | bool, ...]:
    """A value of `SETTINGS`."""
    return (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed % 2**64,
        sampling.num_logprobs is not None,
        sampling.num_logprobs or 0,
    )


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Whom R rows of logits are for."""

    settings: NDArray[np.void]  # [R] of SETTINGS
    positions: NDArray[np.int64]  # [R] of the token to be sampled, in its sequence
    edits: Mapping[int, LogitEdits]  # by index in [0, R)


@dataclass(frozen=True, slots=True)
class Samples:
    token_ids: NDArray[np.int64]  # [R]; meaningless where `usable` is false
    usable: NDArray[np.bool_]  # [R] false where no token could be chosen: a NaN, or nothing left
    logprobs: Mapping[int, TokenLogprobs]  # by index, for the usable rows that asked


class Head(Protocol):
    """The part of a model that knows what follows a hidden state; see `Decoder`."""

    def logits(self, hidden: Tensor) -> Tensor: ...
    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]: ...


def sample(head: Head, hidden: Tensor, batch: SampleBatch) -> Samples:
    """`hidden` [R, H]."""
    if not len(batch.settings):
        return Samples(np.empty(0, np.int64), np.empty(0, np.bool_), {})
    count = _tokens_needed(batch)
    if count is None:
        return sample_from(head.logits(hidden), batch)
    token_ids, logits = head.best_tokens(hidden, count)  # [R, count], falling
    places, usable = _choose(logits, np.zeros(len(logits), np.int64), logits[:, 0], batch)
    chosen = token_ids.gather(1, torch.from_numpy(places).to(token_ids.device)[:, None])
    return Samples(chosen[:, 0].cpu().numpy(), usable, {})


def sample_from(logits: Tensor, batch: SampleBatch) -> Samples:
    """`logits` [R, V], R above 0, are not changed. Greedy rows cost one argmax."""
    settings = batch.settings
    chosen_from = edited(logits, batch.edits) if batch.edits else logits
    greedy_ids, best = ops.best_token(chosen_from)
    token_ids, usable = _choose(chosen_from, greedy_ids.cpu().numpy(), best, batch)
    wanted = np.flatnonzero(settings["wants_logprobs"] & usable)
    if not len(wanted):
        return Samples(token_ids, usable, {})
    entries = logprobs_of(_rows(logits, wanted), token_ids[wanted], settings["num_logprobs"][wanted])
    return Samples(token_ids, usable, dict(zip(wanted.tolist(), entries, strict=True)))


def logprobs_of(
    logits: Tensor, token_ids: NDArray[np.int64], counts: NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Of one token and of the `counts` [R] best of each row of `logits` [R, V], R above 0."""
    most = min(max(int(counts.max()), 1), logits.shape[-1])
    results = ops.token_logprobs(logits, torch.from_numpy(token_ids).to(logits.device), most)
    columns = [result.cpu().tolist() for result in results]
    logprobs = []
    for count, chosen, logprob, rank, ids, values, ranks in zip(
        counts.tolist(), token_ids.tolist(), *columns, strict=True
    ):
        best = list(zip(ids, values, ranks, strict=True))[: count or int(rank > 1)]
        entries = [(chosen, logprob, rank), *(entry for entry in best if entry[0] != chosen)]
        logprobs.append(TokenLogprobs(*(tuple(column) for column in zip(*entries, strict=True))))
    return logprobs


def _tokens_needed(batch: SampleBatch) -> int | None:
    """How many of the best tokens decide every row: one if it is greedy, else top-k. None if too many do."""
    settings = batch.settings
    if batch.edits or settings["wants_logprobs"].any():
        return None
    needed = np.where(settings["temperature"] > 0, settings["top_k"], 1)
    return int(needed.max()) if needed.min() > 0 and needed.max() <= _MOST_CANDIDATES else None


def _choose(
    logits: Tensor, greedy: NDArray[np.int64], best: Tensor, batch: SampleBatch
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A column of each row of `logits`, of which `greedy` are the largest, and whether it means anything.
    `best` [R]: the largest logits."""
    usable = np.isfinite(best.cpu().numpy())
    random = np.flatnonzero((batch.settings["temperature"] > 0) & usable)
    if len(random):
        drawn = _draw(_rows(logits, random), batch.settings[random], batch.positions[random])
        greedy[random] = drawn.cpu().numpy()
    return greedy, usable


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each pair: two rounds of SplitMix64 (Steele et al., OOPSLA 2014), 53 bits."""
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Some rows, without a copy when they are all of them."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def _draw(logits: Tensor, settings: NDArray[np.void], positions: NDArray[np.int64]) -> Tensor:
    columns = [settings[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")]
    columns.append(uniforms(settings["seed"], positions))
    return ops.sample(logits, *(torch.from_numpy(column).to(logits.device) for column in columns))
