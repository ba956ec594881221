"""Reference of the sampling kernels; see `ops` for shapes and meaning.

Everything about one row is a function of that row alone, never of the batch's other rows, so that a seeded
sample is the same whatever it is computed with.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 256  # vocabulary entries summed at once when a draw is looked up in the unsorted distribution

# Rows that need their candidates in order try so many of the best first; what is left undecided tries the
# next. At 32 rows of 49152 entries the first costs 2 ms, the second 10 ms and a full sort 58 ms.
_CANDIDATES = (128, 2048)


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, token_ids = logits.max(dim=-1)  # a NaN is the maximum of its row
    return token_ids, best.float()


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    ids, values = ids[:, :count].contiguous(), values[:, :count].contiguous()
    return ids, values.masked_fill(values[:, :1].isnan(), torch.nan)  # which sorts first


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    weights = logits.float()
    weights = weights - weights.amax(dim=-1, keepdim=True)  # before the division, which could overflow
    weights = weights.div_(temperature[:, None]).exp_()  # [R, V], 1 at the best: probabilities up to a factor
    weights.masked_fill_(weights < min_p[:, None], 0.0)
    vocab_size = logits.shape[-1]
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    ordered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)
    rows = (~ordered).nonzero()[:, 0]
    if len(rows):
        token_ids[rows] = _draw(weights[rows], uniforms[rows])
    rows = ordered.nonzero()[:, 0]
    for count in (*_CANDIDATES, vocab_size):
        if len(rows):
            count = min(count, vocab_size)
            drawn, decided = _draw_ordered(weights[rows], top_k[rows], top_p[rows], uniforms[rows], count)
            token_ids[rows[decided]] = drawn[decided]
            rows = rows[~decided]
    return token_ids


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts the cumulative distribution in vocabulary order: first over tiles, then inside one."""
    tiles = F.pad(weights, (0, -weights.shape[-1] % _TILE)).view(len(weights), -1, _TILE)
    tile, target = _invert(tiles.sum(dim=-1), uniforms)
    inside = tiles[torch.arange(len(tiles), device=tiles.device), tile]  # [R, _TILE]
    token, _ = _invert(inside, target)
    return tile * _TILE + token


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The entry that holds the point `uniforms` of the way through, and how far through it that point is."""
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = (uniforms * ends[:, -1])[:, None]
    # The point may round to the very end; the clamp keeps it inside the last entry that weighs anything.
    last = (ends < ends[:, -1:]).sum(dim=-1, keepdim=True)
    index = torch.searchsorted(ends, targets, right=True).minimum(last)
    weight = weights.gather(1, index).double()
    through = (targets - (ends.gather(1, index) - weight)) / weight
    return index[:, 0], through[:, 0].clamp(0.0, 1.0)


def _draw_ordered(
    weights: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Draws from the `count` best of each row [R, V], in falling order, and says for which rows that many
    were enough to tell: there, what top-k and top-p keep is a prefix of the candidates."""
    vocab_size = weights.shape[-1]
    if count == vocab_size:
        candidates, order = weights.sort(dim=-1, descending=True, stable=True)
    else:
        candidates, order = weights.topk(count, dim=-1)
    top_k = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    kept = torch.arange(count, device=weights.device) < top_k  # [R, count]
    ends = (candidates * kept).cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(top_k <= count, ends[:, -1:], weights.sum(dim=-1, keepdim=True, dtype=torch.float64))
    before = ends - candidates  # the weight of all that is better
    kept &= (before < top_p[:, None] * total) & (candidates > 0)
    # Top-p is a share of what top-k and min-p leave. When top-k cuts further on, that is known only if min-p
    # cuts before.
    known = (top_k[:, 0] >= vocab_size) | (candidates[:, -1] == 0)
    decided = (top_k[:, 0] <= count) | (known & ~kept[:, -1])
    if count == vocab_size:
        decided = torch.ones_like(decided)
    index, _ = _invert(candidates * kept, uniforms)
    return order.gather(1, index[:, None])[:, 0], decided


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_best: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > chosen).sum(dim=-1) + 1
    best, best_ids = logprobs.topk(num_best, dim=-1)
    # Equals share a rank, as with the chosen token's.
    best_ranks = (best[:, None, :] > best[:, :, None]).sum(dim=-1) + 1
    return chosen[:, 0], rank, best_ids, best, best_ranks
