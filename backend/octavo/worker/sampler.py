"""Hidden states to tokens, for all sequences of a step at once: `send` before the forward, `draw` behind it,
and `read`, the only one that waits for the device.

All logits are only computed where somebody needs more than the best few of them, or edits them.

A draw is determined by the sequence's seed and the position of the new token, by a counter-based hash. So a
seeded sample is the same whatever else is in the batch, after a preemption, and after a restart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.protocol import RowSampling, TokenLogprobs
from octavo.worker.logit_edits import BatchEdits, LogitEdits, edited, to_device
from octavo.worker.transfers import Transfers
from octavo_kernels import gpu, ops

# Above, writing all logits is cheaper: 64 best of 49152 cost a millisecond more than one, at 32 rows. A GPU
# writes them in any case, and draws from all of them as fast as it finds the best.
_MOST_CANDIDATES, _MOST_ON_GPU = 64, 1

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
class Draws:
    """The rows that are drawn at random, and the other arguments of `ops.sample` for them."""

    rows: Tensor | None  # [n] int64; None: all R
    columns: tuple[Tensor, ...]  # each [n]


@dataclass(frozen=True, slots=True)
class SampleInput:
    """A batch with all of it that the device needs; made by `send`."""

    batch: SampleBatch
    draws: Draws | None  # None: all rows are greedy
    edits: BatchEdits | None
    wanted: NDArray[np.int64]  # [W] the rows whose log-probabilities are wanted,
    wanted_rows: Tensor | None  # the same on the device; None: all, or none


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a device may still be at work on."""

    sampling: SampleInput
    token_ids: Tensor  # [R] int64
    usable: Tensor  # [R] bool
    logprobs: tuple[Tensor, ...] = ()  # of the W wanted rows, as `ops.token_logprobs` has them


@dataclass(frozen=True, slots=True)
class Samples:
    token_ids: NDArray[np.int64]  # [R]; meaningless where `usable` is false
    usable: NDArray[np.bool_]  # [R] false where no token could be chosen: a NaN, or nothing left
    logprobs: Mapping[int, TokenLogprobs]  # by index, for the usable rows that asked


class Head(Protocol):
    """The part of a model that knows what follows a hidden state; see `Decoder`."""

    def logits(self, hidden: Tensor) -> Tensor: ...
    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]: ...


def send(batch: SampleBatch, add: Callable[[NDArray[Any]], Tensor]) -> SampleInput:
    """`add` is that of `Transfers`: the rest goes with the step's other arrays."""
    settings = batch.settings
    random = np.flatnonzero(settings["temperature"] > 0)
    draws = None
    if len(random):
        drawn, positions = settings[random], batch.positions[random]
        columns = [drawn[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")]
        columns.append(uniforms(drawn["seed"], positions))
        draws = Draws(_sent(random, len(settings), add), tuple(map(add, columns)))
    wanted = np.flatnonzero(settings["wants_logprobs"])
    return SampleInput(
        batch,
        draws,
        to_device(batch.edits, add) if batch.edits else None,
        wanted,
        _sent(wanted, len(settings), add) if len(wanted) else None,
    )


def draw(head: Head, hidden: Tensor, sampling: SampleInput) -> Drawn | None:
    """Of the R rows `hidden` [R, H]; None where there are none. Waits for nothing."""
    if not len(sampling.batch.settings):
        return None
    count = _tokens_needed(sampling.batch)
    if count is None or count > (_MOST_ON_GPU if gpu.serves(hidden) else _MOST_CANDIDATES):
        return draw_from(head.logits(hidden), sampling)
    token_ids, logits = head.best_tokens(hidden, count)  # [R, count], falling
    chosen, draws = token_ids[:, 0], sampling.draws
    if draws is not None:
        places = ops.sample(_rows(logits, draws.rows), *draws.columns)
        chosen = _merged(chosen, _rows(token_ids, draws.rows).gather(1, places[:, None])[:, 0], draws)
    return Drawn(sampling, chosen, logits[:, 0].isfinite())


def draw_from(logits: Tensor, sampling: SampleInput) -> Drawn:
    """`logits` [R, V], R above 0, are not changed. Greedy rows cost one argmax."""
    chosen_from = logits if sampling.edits is None else edited(logits, sampling.edits)
    chosen, best = ops.best_token(chosen_from)
    draws = sampling.draws
    if draws is not None:
        chosen = _merged(chosen, ops.sample(_rows(chosen_from, draws.rows), *draws.columns), draws)
    usable = best.isfinite()
    if not len(sampling.wanted):
        return Drawn(sampling, chosen, usable)
    rows, counts = sampling.wanted_rows, sampling.batch.settings["num_logprobs"][sampling.wanted]
    return Drawn(sampling, chosen, usable, token_logprobs(_rows(logits, rows), _rows(chosen, rows), counts))


def read(drawn: Drawn | None, transfers: Transfers) -> Samples:
    """Waits until all is there."""
    if drawn is None:
        return Samples(np.empty(0, np.int64), np.empty(0, np.bool_), {})
    token_ids, usable, *columns = transfers.read((drawn.token_ids, drawn.usable, *drawn.logprobs))
    if not columns:
        return Samples(token_ids, usable, {})
    wanted = drawn.sampling.wanted
    counts = drawn.sampling.batch.settings["num_logprobs"][wanted]
    entries = logprobs_of(token_ids[wanted], counts, columns)
    by_row = zip(wanted.tolist(), entries, strict=True)
    return Samples(token_ids, usable, {row: entry for row, entry in by_row if usable[row]})


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """Of one token and of as many of the best of each row of `logits` [R, V], R above 0, as the largest of
    `counts` says: what `logprobs_of` takes."""
    return ops.token_logprobs(logits, token_ids, min(max(int(counts.max()), 1), logits.shape[-1]))


def logprobs_of(
    token_ids: NDArray[np.int64], counts: NDArray[np.int64], columns: Sequence[NDArray[Any]]
) -> list[TokenLogprobs]:
    """Of one token and of the `counts` [R] best of each row, out of what `token_logprobs` gave."""
    logprobs = []
    for count, chosen, logprob, rank, ids, values, ranks in zip(
        counts.tolist(), token_ids.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        best = list(zip(ids, values, ranks, strict=True))[: count or int(rank > 1)]
        entries = [(chosen, logprob, rank), *(entry for entry in best if entry[0] != chosen)]
        logprobs.append(TokenLogprobs(*(tuple(column) for column in zip(*entries, strict=True))))
    return logprobs


def _tokens_needed(batch: SampleBatch) -> int | None:
    """How many of the best tokens decide every row: one if it is greedy, else top-k. None if all do."""
    settings = batch.settings
    if batch.edits or settings["wants_logprobs"].any():
        return None
    needed = np.where(settings["temperature"] > 0, settings["top_k"], 1)
    return int(needed.max()) if needed.min() > 0 else None


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each pair: two rounds of SplitMix64 (Steele et al., OOPSLA 2014), 53 bits."""
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _sent(rows: NDArray[np.int64], count: int, add: Callable[[NDArray[Any]], Tensor]) -> Tensor | None:
    """Some of `count` rows, on the device; None when they are all of them."""
    return None if len(rows) == count else add(rows)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows, without a copy when they are all of them."""
    return tensor if rows is None else tensor.index_select(0, rows)


def _merged(greedy: Tensor, drawn: Tensor, draws: Draws) -> Tensor:
    return drawn if draws.rows is None else greedy.index_copy(0, draws.rows, drawn)
