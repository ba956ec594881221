"""Part of `gpu.py`: what the card copies and multiplies in a second, and how near attention comes to it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from gpu_report import Row, guarded, seconds
from torch import Tensor

from octavo_kernels import kv_format, ops

BLOCK_SIZE = 16
HEAD_SIZE = 128
DECODE_GOAL, PREFILL_GOAL = 0.85, 0.6
QUANTISED = {" int8": torch.int8, " fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float  # read and written by a copy
    flops_per_s: float  # of a product of large bfloat16 matrices


def rows(device: torch.device, toy: bool) -> Iterator[Row]:
    """The two of `Limits`, in GB and TFLOP."""
    source = torch.empty(2**20 if toy else 2**31, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds(lambda: copy.copy_(source), device)
    yield Row("copy on the device, read and written", rate * 1e-9, "GB/s")
    size = 128 if toy else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    rate = 2 * size**3 / seconds(lambda: a @ b, device)
    yield Row("matrix product, bfloat16", rate * 1e-12, "TFLOP/s")


def attention_rows(device: torch.device, limits: Limits, toy: bool) -> Iterator[Row]:
    """Over one layer's cache, in blocks in random order."""
    for heads, kv_heads in [(4, 1)] if toy else [(32, 8), (32, 32)]:
        yield from guarded("decode attention", _decode_rows(device, limits, toy, heads, kv_heads))
        yield from guarded("prefill attention", _prefill_rows(device, limits, toy, heads, kv_heads))


def _decode_rows(device: torch.device, limits: Limits, toy: bool, heads: int, kv_heads: int) -> Iterator[Row]:
    batch, context = (2, 40) if toy else (64, 4096)
    for name, attend, num_bytes in _Work(device, batch, 1, context, heads, kv_heads).decoding():
        rate = num_bytes / seconds(attend, device)
        goal = None if name else DECODE_GOAL
        label = f"decode attention, {heads} heads over {kv_heads}{name}, {batch} x {context}"
        yield Row(label, rate * 1e-9, "GB/s", rate / limits.bytes_per_s, goal)


def _prefill_rows(
    device: torch.device, limits: Limits, toy: bool, heads: int, kv_heads: int
) -> Iterator[Row]:
    prompts, length = (1, 40) if toy else (4, 4096)
    work = _Work(device, prompts, length, length, heads, kv_heads)
    rate = work.flops / seconds(work.attend, device)
    label = f"prefill attention, {heads} heads over {kv_heads}, {prompts} x {length}"
    yield Row(label, rate * 1e-12, "TFLOP/s", rate / limits.flops_per_s, PREFILL_GOAL)
    rate = work.flops / seconds(work.by_torch(), device)
    label = f"the same by torch, keys side by side, {heads} over {kv_heads}"
    yield Row(label, rate * 1e-12, "TFLOP/s", rate / limits.flops_per_s)


class _Work:
    """So many sequences with `new` tokens and a context each."""

    def __init__(
        self, device: torch.device, sequences: int, new: int, context: int, heads: int, kv_heads: int
    ) -> None:
        self._new, self._scale = new, HEAD_SIZE**-0.5
        blocks = -(-context // BLOCK_SIZE)
        shape = sequences * blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE
        self._caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        contexts = torch.full((sequences,), context, dtype=torch.int32)
        starts = new * torch.arange(sequences + 1).int()
        layout = ops.KVLayout(kv_heads, BLOCK_SIZE, None, device)
        host = [a.numpy() for a in (tables, contexts, starts)]
        self._plan = ops.plan_batch(layout, *host, np.empty(0, np.int64))
        self._integers = [a.to(device) for a in (tables, contexts, starts)]
        self._q = torch.randn(sequences * new, heads, HEAD_SIZE, dtype=torch.bfloat16, device=device)
        seen = sequences * (new * context - new * (new - 1) // 2)
        self.flops = 4 * seen * heads * HEAD_SIZE

    def attend(self, caches: list[Tensor] | None = None) -> Tensor:
        return ops.paged_attention(
            self._q, *(caches or self._caches), *self._integers, self._scale, plan=self._plan
        )

    def decoding(self) -> Iterator[tuple[str, Callable[[], Tensor], int]]:
        """By what the cache holds: its name, the call, and the bytes that it has to read."""
        yield "", self.attend, sum(cache.nbytes for cache in self._caches)
        for name, kind in QUANTISED.items():
            caches = [self._quantised(cache, kind) for cache in self._caches]
            yield name, partial(self.attend, caches), sum(cache.nbytes for cache in caches)

    def _quantised(self, cache: Tensor, kind: torch.dtype) -> Tensor:
        shape = kv_format.block_shape(cache.shape[1], BLOCK_SIZE, HEAD_SIZE, kind)
        made = torch.empty((len(cache), *shape), dtype=kind, device=cache.device)
        tokens = cache.transpose(1, 2).flatten(0, 1)
        ops.kv_store(tokens, tokens, made, made, torch.arange(len(tokens), device=cache.device))
        return made

    def by_torch(self) -> Callable[[], Tensor]:
        """Torch's own attention of whole prompts, over keys and values that lie side by side."""
        q = self._q.view(-1, self._new, *self._q.shape[1:]).transpose(1, 2)
        k, v = (self._side_by_side(cache) for cache in self._caches)
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def _side_by_side(self, cache: Tensor) -> Tensor:
        sequences = len(self._integers[1])
        ordered = cache.transpose(1, 2).reshape(sequences, -1, cache.shape[1], HEAD_SIZE)
        return ordered[:, : self._new].transpose(1, 2).contiguous()
