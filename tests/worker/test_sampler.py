"""The sampler: frequencies, seeds, log-probabilities, and rows that cannot be sampled."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.protocol import RowSampling
from octavo.worker import sampler
from octavo.worker.logit_edits import LogitEdits
from octavo.worker.sampler import SETTINGS, SampleBatch, Samples, settings_of, uniforms
from octavo.worker.transfers import HOST
from octavo_kernels import ops, reference

VOCAB = 50


class Identity:
    """A head that is given logits; it counts how often all of them were wanted."""

    def __init__(self) -> None:
        self.num_whole = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_whole += 1
        return hidden

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return ops.best_logits(hidden, count)


def sample(logits: Tensor, batch: SampleBatch) -> Samples:
    return sample_with(Identity(), logits, batch)


def sample_with(head: Identity, logits: Tensor, batch: SampleBatch) -> Samples:
    return sampler.read(sampler.draw(head, logits, sampler.send(batch, HOST.add)), HOST)


def batch_of(
    samplings: list[RowSampling],
    positions: list[int] | None = None,
    edits: Mapping[int, LogitEdits] | None = None,
) -> SampleBatch:
    settings = np.array([settings_of(s) for s in samplings], SETTINGS)
    return SampleBatch(settings, np.array(positions or [0] * len(samplings)), edits or {})


def forbidding(*token_ids: int) -> LogitEdits:
    return LogitEdits(forbidden=np.array(token_ids))


def sampling(temperature: float = 1.0, seed: int = 0, num_logprobs: int | None = None) -> RowSampling:
    return RowSampling(temperature, 0, 1.0, 0.0, seed, num_logprobs)


def logits_for(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("by", ["seed", "position"])
def test_frequencies_with_everything_on(by: str) -> None:
    """Chi-square of 20000 draws against the exact distribution, told apart by seeds or by positions."""
    count = 20000
    logits = logits_for(1)
    probs = (logits[0].double() / 1.4).softmax(0)
    probs[probs < 0.02 * probs.max()] = 0
    ranked = probs.argsort(descending=True)
    probs[ranked[12:]] = 0
    probs /= probs.sum()
    better = probs[ranked].cumsum(0) - probs[ranked]
    probs[ranked[better >= 0.9]] = 0
    expected = (probs / probs.sum() * count).numpy()
    kept = expected > 0
    assert 5 < kept.sum() < 12  # min-p, top-k and top-p all have something to cut

    numbers = list(range(count))
    seeds, positions = (numbers, [17] * count) if by == "seed" else ([17] * count, numbers)
    samplings = [RowSampling(1.4, 12, 0.9, 0.02, seed) for seed in seeds]
    drawn = sample(logits.expand(count, -1), batch_of(samplings, positions))
    assert drawn.usable.all()
    observed = np.bincount(drawn.token_ids, minlength=VOCAB)
    assert observed[~kept].sum() == 0
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), chi_square


def test_frequencies_with_edited_logits() -> None:
    """Chi-square against the distribution that the definitions give, written down token by token."""
    count = 20000
    logits = logits_for(1, seed=5).bfloat16()
    prompt, output = [3, 4, 5, 6], [5, 5, 5, 8, 9, 9]
    by_hand = logits[0].double().tolist()
    by_hand[11] += 3.5
    by_hand[5] -= 4.0
    for token in {*prompt, *output}:
        by_hand[token] = by_hand[token] / 1.7 if by_hand[token] > 0 else by_hand[token] * 1.7
    for token in set(output):
        by_hand[token] -= 0.6 * output.count(token) + 0.9
    del by_hand[40:]  # 0 to 39 are allowed
    by_hand[12] = -np.inf
    expected = (torch.tensor(by_hand).double() / 1.4).softmax(0).numpy() * count

    seen = np.array(sorted({*prompt, *output}))
    edits = LogitEdits(
        biased=np.array([11, 5]),
        biases=np.array([3.5, -4.0], np.float32),
        seen=seen,
        counts=np.array([output.count(token) for token in seen], np.float32),
        repetition=1.7,
        frequency=0.6,
        presence=0.9,
        allowed=np.arange(40),
        forbidden=np.array([12]),
    )
    samplings = [sampling(1.4, seed=seed) for seed in range(count)]
    drawn = sample(logits.expand(count, -1), batch_of(samplings, edits=dict.fromkeys(range(count), edits)))
    assert drawn.usable.all()
    observed = np.bincount(drawn.token_ids, minlength=VOCAB)
    assert observed[40:].sum() == observed[12] == 0
    often = expected >= 5  # the rest in one bin, as the test wants no bin of a few
    bins = np.append(expected[often], expected[~often].sum())
    found = np.append(observed[:40][often], observed[:40][~often].sum())
    chi_square = ((found - bins) ** 2 / np.maximum(bins, 1e-9)).sum()
    assert 10 < len(bins) < 40
    freedom = len(bins) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), chi_square


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = logits_for(64)
    samplings = [
        RowSampling([0.7, 1.0, 3.0][i % 3], [0, 5][i % 2], [1.0, 0.8][i // 2 % 2], 0.0, seed=i // 8)
        for i in range(64)
    ]
    positions = [i % 8 for i in range(64)]
    together = sample(logits, batch_of(samplings, positions)).token_ids
    order = np.random.default_rng(0).permutation(64)
    shuffled = sample(
        logits[order], batch_of([samplings[i] for i in order], [positions[i] for i in order])
    ).token_ids
    assert shuffled.tolist() == together[order].tolist()
    for i in range(64):
        alone = sample(logits[i : i + 1], batch_of([samplings[i]], [positions[i]])).token_ids
        assert alone[0] == together[i]


def test_the_hash_does_not_change_between_versions() -> None:
    """A seed in somebody's test must give the same sample after an upgrade."""
    seeds = np.array([0, 1, 2**64 - 1, 12345], np.uint64)
    values = uniforms(seeds, np.array([0, 0, 5, 1000]))
    assert values.tolist() == [
        0.6524484863740322,
        0.36818951565166946,
        0.20852775745463303,
        0.4069272093469283,
    ]
    assert uniforms(seeds[:1], np.array([1])).tolist() != values[:1].tolist()


def test_uniforms_are_even_and_uncorrelated() -> None:
    grid = uniforms(np.arange(300, dtype=np.uint64).repeat(300), np.tile(np.arange(300), 300))
    assert 0 <= grid.min() < 1e-3 < 0.999 < grid.max() < 1
    counts, _ = np.histogram(grid, 100, (0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 4 * np.sqrt(2 * 99)
    table = grid.reshape(300, 300)
    for neighbour in (table[1:, :] * table[:-1, :], table[:, 1:] * table[:, :-1]):
        assert neighbour.mean() == pytest.approx(0.25, abs=0.004)


def test_greedy_and_random_rows_together() -> None:
    logits = logits_for(4)
    samplings = [sampling(0.0), sampling(1.0, seed=5), sampling(0.0), sampling(1e-5, seed=9)]
    token_ids = sample(logits, batch_of(samplings)).token_ids
    best = logits.argmax(-1).numpy()
    assert token_ids[[0, 2, 3]].tolist() == best[[0, 2, 3]].tolist()
    assert token_ids[1] == sample(logits[1:2], batch_of([samplings[1]])).token_ids[0]


def test_an_all_greedy_batch_never_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_kernels.ops.sample", None)
    logits = logits_for(5).bfloat16()
    drawn = sample(logits, batch_of([sampling(0.0)] * 5))
    assert drawn.token_ids.tolist() == logits.argmax(-1).tolist()
    assert not drawn.logprobs


def test_unusable_rows_say_so_and_the_others_go_on() -> None:
    logits = logits_for(6)
    logits[1] = torch.nan
    logits[2, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4, 7] = torch.inf
    samplings = [sampling(float(i % 2), num_logprobs=1) for i in range(6)]
    drawn = sample(logits, batch_of(samplings))
    assert drawn.usable.tolist() == [True, False, False, False, False, True]
    assert drawn.token_ids[0] == logits[0].argmax()
    assert drawn.logprobs.keys() == {0, 5}


@pytest.mark.parametrize("draw", [ops.sample, reference.sampling.sample])
def test_unusable_rows_are_drawn_from_all_the_same(draw: Callable[..., Tensor]) -> None:
    """Whether a row is usable is not known yet when it is drawn from."""
    logits = logits_for(4 * 7)
    logits[0::4] = torch.nan
    logits[1::4, 3] = torch.nan
    logits[2::4] = -torch.inf
    top_k = torch.tensor([0, 1, 5, 0, 5, 0, 0]).repeat_interleave(4)
    top_p = torch.tensor([1.0, 1, 1, 0.9, 0.9, 1, 0.5]).repeat_interleave(4)
    min_p = torch.tensor([0.0, 0, 0, 0, 0, 0.1, 0.1]).repeat_interleave(4)
    uniform = torch.linspace(0, 0.99, 28, dtype=torch.float64)
    drawn = draw(logits, torch.ones(28), top_k, top_p, min_p, uniform)
    assert ((drawn >= 0) & (drawn < VOCAB)).all()
    good = slice(3, None, 4)
    alone = draw(logits[good], torch.ones(7), top_k[good], top_p[good], min_p[good], uniform[good])
    assert torch.equal(drawn[good], alone)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_not_sampled(temperature: float) -> None:
    logits = logits_for(2)
    best = logits.argmax(-1).tolist()
    logits[0, best[0]] = 30.0
    samplings = [sampling(temperature, num_logprobs=1)] * 2
    drawn = sample(logits, batch_of(samplings, edits={0: forbidding(best[0], 10**6)}))
    assert drawn.token_ids[0] != best[0]
    assert drawn.logprobs[0].token_ids[1] == best[0]  # log-probabilities are of the untouched distribution
    assert sample(logits, batch_of(samplings)).token_ids[0] == best[0]
    assert logits[0, best[0]] == 30.0
    everything = sample(logits, batch_of(samplings, edits={1: forbidding(*range(VOCAB))}))
    assert everything.usable.tolist() == [True, False]


def test_edits_of_one_row_leave_the_tokens_of_others_alone() -> None:
    """Edited batches are sampled in float32, from all logits: neither may tell."""
    count = 300
    logits = logits_for(count, seed=4).bfloat16()
    samplings = [
        RowSampling([0.0, 0.8, 1.5][i % 3], [0, 3, 9][i // 3 % 3], 1.0 - 0.2 * (i % 2), 0.0, i)
        for i in range(count)
    ]
    plain = sample(logits, batch_of(samplings)).token_ids
    best = logits.float().argmax(-1).tolist()
    edits = {i: forbidding(best[i]) for i in range(0, count, 7)}
    beside = sample(logits, batch_of(samplings, edits=edits)).token_ids
    others = [i for i in range(count) if i not in edits]
    assert beside[others].tolist() == plain[others].tolist()
    assert all(beside[i] != best[i] for i in edits)
    for i in edits:
        alone = sample(logits[i : i + 1], batch_of([samplings[i]], edits={0: edits[i]}))
        assert alone.token_ids[0] == beside[i]


def test_logprobs_are_those_of_torch() -> None:
    logits = logits_for(4).bfloat16()
    samplings = [
        sampling(0.0, num_logprobs=None),
        sampling(0.0, num_logprobs=0),
        sampling(0.0, num_logprobs=3),
        sampling(20.0, seed=3, num_logprobs=2),  # far from the best, whatever the temperature
    ]
    drawn = sample(logits, batch_of(samplings))
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert drawn.logprobs.keys() == {1, 2, 3}
    best = [row.argsort(descending=True, stable=True).tolist() for row in logits.float()]
    assert drawn.logprobs[1].token_ids == (best[1][0],)
    assert drawn.logprobs[2].token_ids == tuple(best[2][:3])
    assert drawn.logprobs[2].ranks == (1, 2, 3)
    chosen = int(drawn.token_ids[3])
    assert chosen not in best[3][:2]
    assert drawn.logprobs[3].token_ids == (chosen, *best[3][:2])
    assert drawn.logprobs[3].ranks == (1 + int((expected[3] > expected[3, chosen]).sum()), 1, 2)
    for row, logprobs in drawn.logprobs.items():
        wanted = expected[row, list(logprobs.token_ids)].tolist()
        assert logprobs.logprobs == pytest.approx(wanted, abs=1e-5)


def test_the_best_token_is_told_even_at_zero_logprobs_where_another_was_drawn() -> None:
    logits = logits_for(40, seed=2)
    drawn = sample(logits, batch_of([sampling(3.0, seed=i, num_logprobs=0) for i in range(40)]))
    expected = torch.log_softmax(logits.double(), dim=-1)
    best = logits.argmax(-1).tolist()
    kinds = set()
    for row, token in enumerate(drawn.token_ids.tolist()):
        entry = drawn.logprobs[row]
        rank = 1 + int((expected[row] > expected[row, token]).sum())
        assert entry.token_ids == ((token,) if token == best[row] else (token, best[row]))
        assert entry.ranks == ((1,) if token == best[row] else (rank, 1))
        assert entry.logprobs == pytest.approx(expected[row, list(entry.token_ids)].tolist(), abs=1e-5)
        kinds.add(len(entry.token_ids))
    assert kinds == {1, 2}


def test_more_logprobs_than_tokens() -> None:
    drawn = sample(torch.tensor([[0.0, 1.0, 2.0]]), batch_of([sampling(0.0, num_logprobs=20)]))
    assert drawn.logprobs[0].token_ids == (2, 1, 0)


def test_nobody_samples() -> None:
    drawn = sample(torch.empty(0, VOCAB), batch_of([]))
    assert len(drawn.token_ids) == len(drawn.usable) == len(drawn.logprobs) == 0


def test_all_logits_are_only_computed_where_a_row_needs_them() -> None:
    greedy, top_k = sampling(0.0), RowSampling(1.0, 7, 0.9, 0.01, 0)
    for samplings, whole in [
        ([greedy], 0),
        ([greedy, top_k], 0),
        ([greedy, sampling(1.0)], 1),
        ([greedy, sampling(0.0, num_logprobs=0)], 1),
        ([RowSampling(1.0, 65, 1.0, 0.0, 0)], 1),
    ]:
        head = Identity()
        sample_with(head, logits_for(len(samplings)), batch_of(samplings))
        assert head.num_whole == whole, samplings
    head = Identity()
    sample_with(head, logits_for(1), batch_of([greedy], edits={0: forbidding(3)}))
    assert head.num_whole == 1


def test_a_gpu_draws_from_all_logits_and_has_only_the_best_one_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "gpu", SimpleNamespace(serves=lambda x: True))
    greedy, limited = sampling(0.0), RowSampling(1.0, 7, 1.0, 0.0, 0)
    for samplings, whole in ([greedy, greedy], 0), ([greedy, limited], 1):
        head = Identity()
        sample_with(head, logits_for(2), batch_of(samplings))
        assert head.num_whole == whole


def test_a_draw_among_the_best_is_the_same_from_all_logits() -> None:
    """Whether they are computed depends on the other rows of the batch. Equal logits must not tell either."""
    count = 500
    logits = (logits_for(count, seed=3) * 2).round() / 2
    samplings = [
        RowSampling(0.5 + i % 4, 1 + i % 9, 1.0 - 0.1 * (i % 3), 0.05 * (i % 2), i) for i in range(count)
    ]
    few = sample(logits, batch_of(samplings))
    forced = [*samplings[:-1], RowSampling(1.0, 0, 1.0, 0.0, 0)]
    everything = sample(logits, batch_of(forced))
    assert few.usable.all()
    assert (few.token_ids[:-1] == everything.token_ids[:-1]).all()
