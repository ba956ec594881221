"""Reference of `ops.paged_attention`; see there for shapes.

Slots that hold no key of the sequence may hold anything, a NaN included: scores there are replaced, not
added to, and values there are zeroed before they are multiplied by a probability of zero. Scores of single
queries are rounded to the type of q, the one that torch's batched product gives, before the float32 softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels import kv_format
from octavo_kernels.reference.plan import BatchPlan, Bucket, Span


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: BatchPlan,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # q may be a view into wider rows
    for bucket in plan.buckets:
        if bucket.queries is None:
            _decode(q, k_cache, v_cache, bucket, scale, soft_cap, out)
        else:
            part = torch.empty_like(out[: len(bucket.queries)])
            _decode(q.index_select(0, bucket.queries), k_cache, v_cache, bucket, scale, soft_cap, part)
            out.index_copy_(0, bucket.queries, part)
    for span in plan.spans:
        _attend(q[span.begin : span.end], k_cache, v_cache, span, scale, soft_cap, out[span.begin : span.end])
    return out


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bucket: Bucket,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """All sequences of a bucket in two batched products; the query heads that share a KV head are the rows
    of one product, so K and V are not repeated. V is gathered into K's memory, which is near, unless it is
    dequantised."""
    num_kv_heads, head_size = k_cache.shape[1], q.shape[2]
    grouped = (len(q) * num_kv_heads, -1, head_size)
    gathered = _gather(k_cache, bucket.rows, q)
    by_head = gathered.view(grouped)  # [S * Hkv, L, D]
    scores = torch.bmm(q.reshape(grouped), by_head.transpose(1, 2))  # [S * Hkv, Hq / Hkv, L]
    scores = _cap(scores.float(), scale, soft_cap)
    scores.view(len(q), num_kv_heads, *scores.shape[1:]).masked_fill_(bucket.hidden, -torch.inf)
    gathered = _gather(v_cache, bucket.rows, q, gathered)
    by_head = gathered.view(grouped)
    gathered.view(-1, head_size).index_fill_(0, bucket.hidden_rows, 0.0)
    torch.bmm(scores.softmax(dim=-1).to(q.dtype), by_head, out=out.view(grouped))


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: Span,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    num_kv_heads, head_size = k_cache.shape[1], q.shape[2]
    keys = slice(span.first_key, span.first_key + span.num_keys)
    k = _gather(k_cache, span.rows, q).view(num_kv_heads, -1, head_size)[:, keys]
    v = _gather(v_cache, span.rows, q).view(num_kv_heads, -1, head_size)[:, keys]
    by_head = q.transpose(0, 1)  # [Hq, n, D]
    if soft_cap is None:
        visible = None if span.causal else span.visible()
        attended = F.scaled_dot_product_attention(
            by_head[None], k[None], v[None], visible, is_causal=span.causal, scale=scale, enable_gqa=True
        )
        out.copy_(attended[0].transpose(0, 1))
        return
    grouped = by_head.reshape(num_kv_heads, -1, head_size)  # [Hkv, Hq / Hkv * n, D]
    scores = _cap(torch.bmm(grouped, k.transpose(1, 2)).float(), scale, soft_cap)
    by_query = scores.view(-1, len(q), span.num_keys)
    by_query.masked_fill_(~span.visible(), -torch.inf)
    attended = torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)
    out.copy_(attended.view(by_head.shape).transpose(0, 1))


def _cap(scores: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """Scales float32 scores in place, and bends them to stay within +- `soft_cap`."""
    if soft_cap is None:
        return scores.mul_(scale)
    return scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)


def _gather(cache: Tensor, rows: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of [N * Hkv, B * D]: one copy of whole heads of whole blocks, already in the order wanted; in
    `out`, where nothing is dequantised to the type of q."""
    if kv_format.is_quantised(cache.dtype):
        tiles = cache.view(torch.uint8).flatten(0, 1).index_select(0, rows)
        return kv_format.dequantise(tiles.view(cache.dtype), q.shape[2], q.dtype)
    num_blocks, num_kv_heads, block_size, head_size = cache.shape
    return torch.index_select(cache.view(num_blocks * num_kv_heads, block_size * head_size), 0, rows, out=out)
