"""Part of `gpu.py`: every kernel against what it should give, reckoned in float64 with plain torch.

The expectations here are written from the descriptions in `octavo_kernels.ops`, apart from the reference
kernels, and run where those do: on a host they would take most of the script's time.
"""

import math
from collections.abc import Iterator

import torch
from gpu_report import Row, guarded
from torch import Tensor

from octavo_kernels import kv_format, ops

# What rounding makes of a relative error: to the type, and of probabilities on their way to it.
MOST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Query heads, KV heads, their size, and the size of blocks. All of them in one type only: to compile more
# takes minutes.
SHAPES = {
    torch.bfloat16: [(32, 8, 128, 16), (32, 32, 128, 128), (7, 7, 80, 8), (9, 3, 64, 32), (8, 2, 256, 64)],
    torch.float16: [(32, 8, 128, 16)],
    torch.float32: [(7, 7, 80, 8), (9, 3, 64, 64)],
}
KV_TYPES = {"": None, " int8": torch.int8, " fp8": torch.float8_e4m3fn}


def rows(device: torch.device, toy: bool) -> Iterator[Row]:
    dtypes = [torch.float32] if toy else [torch.bfloat16, torch.float16, torch.float32]
    for dtype in dtypes:
        yield from guarded(f"norms and activations, {dtype}", _elementwise(device, dtype, toy))
        yield from _attention(device, dtype, toy)
        if dtype != torch.float16:
            yield from guarded(f"sampling, {dtype}", _sampling(device, dtype, toy))
    yield from guarded("copies", _copies(device, toy))


def _row(what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype, most: float | None = None) -> Row:
    error = float((actual.double() - expected).norm() / expected.norm())
    limit = MOST[dtype] if most is None else most
    name = f"{what}, {str(dtype).removeprefix('torch.')}"
    return Row(name, error if math.isfinite(error) else math.inf, "relative error", goal=limit, is_check=True)


def _exact(what: str, same: Tensor) -> Row:
    return Row(what, int((~same).sum()) / same.numel(), "of them differ", goal=0.0, is_check=True)


def _elementwise(device: torch.device, dtype: torch.dtype, toy: bool) -> Iterator[Row]:
    tokens, hidden = (3, 96) if toy else (1000, 4096)
    x, residual, weight = (
        torch.randn(size, device=device).to(dtype) for size in ((tokens, hidden), (tokens, hidden), hidden)
    )

    def norm(wide: Tensor) -> Tensor:
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    yield _row("rms_norm", ops.rms_norm(x, weight, 1e-5), norm(x.double()), dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    wide = x.double() + residual.double()
    yield _row("add_rms_norm: the norm", normed, norm(wide), dtype)
    yield _row("add_rms_norm: the sum", total, wide, dtype)
    gate_up = torch.randn(tokens, 2 * hidden, device=device).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    yield _row("silu_and_mul", ops.silu_and_mul(gate_up), gate * gate.sigmoid() * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    yield _row("gelu_and_mul", ops.gelu_and_mul(gate_up), expected, dtype)


def _attention(device: torch.device, dtype: torch.dtype, toy: bool) -> Iterator[Row]:
    """Stored by `rope_and_store`, then attended to: decoding sequences, prompts, and chunks behind what is
    cached, in one batch."""
    for shape in [(6, 3, 64, 16)] if toy else SHAPES[dtype]:
        for name, kind in KV_TYPES.items():
            for window, cap in [(None, None)] if toy or kind else [(None, None), (300, 30.0)]:
                rows = _one_attention(device, dtype, shape, name, kind, window, cap, toy)
                yield from guarded(f"attention, {shape}{name}, {dtype}", rows)


def _one_attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    name: str,
    kind: torch.dtype | None,
    window: int | None,
    cap: float | None,
    toy: bool,
) -> Iterator[Row]:
    heads, kv_heads, size, block_size = shape
    # New tokens and context of each sequence.
    lengths = [(1, 40), (7, 7), (5, 29)] if toy else [(1, 1), (1, 4097), (63, 63), (1000, 3000), (1, 130)]
    counts = [-(-context // block_size) for _, context in lengths]
    block = kv_format.block_shape(kv_heads, block_size, size, kind or dtype)
    first = 0 if toy else 2**31 // math.prod(block)  # so that a place is no int32
    free = (first + torch.randperm(sum(counts))).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots = []
    for row, (_, context) in enumerate(lengths):
        tables[row, : counts[row]] = torch.tensor([free.pop() for _ in range(counts[row])])
        where = torch.arange(context)
        slots.append(tables[row].long()[where // block_size] * block_size + where % block_size)
    memory = (first + sum(counts), *block)
    if kind is None:
        caches = [torch.full(memory, math.nan, dtype=dtype, device=device) for _ in range(2)]
    else:
        caches = [torch.full(memory, 127, dtype=torch.uint8, device=device).view(kind) for _ in range(2)]

    num_tokens = sum(context for _, context in lengths)
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, size, device=device).to(dtype)
    positions = torch.cat([torch.arange(context) for _, context in lengths]).to(device)
    angles = positions[:, None] / 10000 ** (torch.arange(0, size, 2, device=device) / size)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).float()
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).float()
    rotated = qkv.double() * cos.double()[:, None] + qkv.double().roll(size // 2, -1) * sin.double()[:, None]
    queries = ops.rope_and_store(qkv.clone(), heads, cos, sin, *caches, torch.cat(slots).to(device))
    label = f"{heads} heads over {kv_heads} of {size}{name}" + (
        f", window {window}, cap {cap:g}" if cap else ""
    )
    ends = torch.tensor([context for _, context in lengths]).cumsum(0)
    asked = torch.cat([torch.arange(end - new, end) for (new, _), end in zip(lengths, ends, strict=True)])
    starts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths]).int()
    integers = [a.to(device) for a in (tables, contexts, starts)]
    actual = ops.paged_attention(queries[asked.to(device)], *caches, *integers, size**-0.5, window, cap)
    parts = []
    for (new, context), end in zip(lengths, ends.tolist(), strict=True):
        own = slice(end - context, end)
        q = rotated[end - new : end, :heads]
        k, v = rotated[own, heads : heads + kv_heads], qkv.double()[own, heads + kv_heads :]
        parts.append(_attend(q, k, v, size**-0.5, window, cap))
    # Of quantised keys and values, random numbers keep 2 to 3 places of e4m3's, and most of int8's.
    most = None if kind is None else {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}[kind]
    yield _row(f"attention, {label}", actual, torch.cat(parts), dtype, most)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cap: float | None) -> Tensor:
    """One sequence's last tokens in float64: q [n, Hq, D]; k, v [L, Hkv, D]."""
    new, length = len(q), len(k)
    k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], dim=1) for a in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    places = torch.arange(length, device=q.device)
    distance = places[length - new :, None] - places
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def _sampling(device: torch.device, dtype: torch.dtype, toy: bool) -> Iterator[Row]:
    """In bfloat16 many of the logits are equals, which count in the order of their ids."""
    count, vocabulary = (5, 700) if toy else (256, 128_256)
    logits = (3 * torch.randn(count, vocabulary, device=device)).to(dtype)
    suffix = f", {str(dtype).removeprefix('torch.')}"
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    ids, values = ops.best_token(logits)
    yield _exact(f"best_token{suffix}", (ids == order[:, 0]) & (values == ordered[:, 0]))
    ids, values = ops.best_logits(logits, 20)
    yield _exact(f"best_logits{suffix}", (ids == order[:, :20]) & (values == ordered[:, :20]))

    temperature = torch.rand(count) + 0.5
    top_k = torch.randint(-25, 50, (count,)).clamp(min=0)
    top_p = (torch.rand(count) * 0.8 + 0.5).clamp(max=1.0)
    min_p = torch.rand(count) * 0.02
    uniforms = torch.rand(count, dtype=torch.float64)
    columns = [a.to(device) for a in (temperature, top_k, top_p, min_p, uniforms)]
    drawn = ops.sample(logits, *columns)
    right = [
        _may_be_drawn(
            int(drawn[i]), logits[i], *(float(c[i]) for c in (temperature, top_k, top_p, min_p, uniforms))
        )
        for i in range(count)
    ]
    yield _exact(f"sample{suffix}", torch.tensor(right))

    chosen, rank, ids, logprobs, _ = ops.token_logprobs(logits, drawn, 5)
    expected = logits.double().log_softmax(-1)
    most = MOST[torch.float32]
    yield _row("token_logprobs: the token's", chosen, expected.gather(1, drawn[:, None])[:, 0], dtype, most)
    yield _row("token_logprobs: the best", logprobs, expected.gather(1, order[:, :5]), dtype, most)
    ranks = 1 + (logits > logits.gather(1, drawn[:, None])).sum(-1)
    yield _exact(f"token_logprobs: ranks{suffix}", rank == ranks)
    yield _exact(f"token_logprobs: ids{suffix}", ids == order[:, :5])


def _may_be_drawn(
    token: int, logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float
) -> bool:
    """Whether `uniform` falls on the token, or within rounding of it. Tokens lie side by side, where top-k or
    top-p cuts from the best on, else in the order of their ids."""
    shares = (logits.double() / temperature).softmax(-1)
    shares[shares < min_p * shares.max()] = 0
    if top_k or top_p < 1:
        shares, order = shares.sort(descending=True, stable=True)
        if top_k:
            shares[int(top_k) :] = 0
        shares[shares.cumsum(0) - shares >= top_p * shares.sum() + 1e-9] = 0
        token = int((order == token).nonzero())
    ends = (shares / shares.sum()).cumsum(0)
    begin = float(ends[token - 1]) if token else 0.0
    return begin - 1e-5 <= uniform <= float(ends[token]) + 1e-5


def _copies(device: torch.device, toy: bool) -> Iterator[Row]:
    planes, blocks, size = (4, 9, 256) if toy else (64, 500, 32768)
    cache = torch.randint(0, 256, (planes, blocks, size), dtype=torch.uint8, device=device)
    on_device = cache.clone()
    order = torch.randperm(blocks).tolist()
    sources, destinations = order[: blocks // 2], order[1 : blocks // 2 + 1]  # each read, then overwritten
    ops.copy_blocks(on_device, sources, destinations)
    expected = cache.clone()
    expected[:, destinations] = cache[:, sources]
    yield _exact("copy_blocks, in a chain", on_device == expected)

    rows = torch.zeros(blocks, planes, size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ops.save_blocks(on_device, sources, rows, destinations)
    if device.type == "cuda":
        torch.cuda.synchronize()
    saved = rows[destinations] == expected[:, sources].transpose(0, 1).cpu()
    yield _exact("save_blocks, to the host", saved)
    ops.restore_blocks(on_device, sources[::-1], rows, destinations)
    expected[:, sources[::-1]] = rows[destinations].transpose(0, 1).to(device)
    yield _exact("restore_blocks, from the host", on_device == expected)
