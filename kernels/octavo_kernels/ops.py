"""The kernels' public face: what each computes, on which shapes and types.

T tokens of S sequences in a batch (a sequence's tokens are consecutive), Hq query heads, Hkv KV heads, D head
size, N KV blocks of B slots, V vocabulary, R rows to sample. Floating-point tensors of a call are of one
type, float32, bfloat16 or float16, unless said otherwise; sums and softmaxes are in float32. Tensors are
contiguous unless said otherwise, and on one device. A KV cache may be quantised: then `k_cache` and `v_cache`
[N, Hkv, B * (D + 2)] are as `kv_format` says, of another type than the rest.

Tensors on an NVIDIA GPU of compute capability 8.0 and newer go to the kernels in `gpu`; CPU tensors of
float32 and bfloat16 to the native kernels in `cpu`, as far as those have them; the torch reference serves all
else. The kernels in `gpu` wait for nothing, and what they launch depends on no value on the device, so that a
CUDA graph can hold them; `copy_blocks`, `save_blocks` and `restore_blocks`, which take host integers, stay
outside of one.

Shapes are the caller's duty: a mismatch is a bug, and shows as torch's own error.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, dtype

from octavo_kernels import gpu, kv_format, reference
from octavo_kernels.cpu import activation as cpu_activation
from octavo_kernels.cpu import block_copy as cpu_block_copy
from octavo_kernels.cpu import library as cpu_library
from octavo_kernels.cpu import linear as cpu_linear
from octavo_kernels.cpu import linear_int8 as cpu_linear_int8
from octavo_kernels.cpu import paged_attention as cpu_paged_attention
from octavo_kernels.cpu import rms_norm as cpu_rms_norm
from octavo_kernels.cpu import rope_store as cpu_rope_store
from octavo_kernels.cpu import sampling as cpu_sampling
from octavo_kernels.cpu.decoder_layers import Attention, FusedLayer, FusedLayers, Norm, Product
from octavo_kernels.cpu.library import native
from octavo_kernels.cpu.linear import PackedLinear
from octavo_kernels.products import (
    Int8Linear,
    fuse_layers,
    fused_product,
    linear,
    linear_int8,
    pack_linear,
    packs_linear,
    quantise_int8,
)
from octavo_kernels.reference.plan import BatchPlan, KVLayout

__all__ = [
    "Attention",
    "BatchPlan",
    "FusedLayer",
    "FusedLayers",
    "Int8Linear",
    "KVLayout",
    "Norm",
    "PackedLinear",
    "Product",
    "add_rms_norm",
    "best_token",
    "copy_blocks",
    "fuse_layers",
    "fused_product",
    "gelu_and_mul",
    "kv_store",
    "linear",
    "linear_best",
    "linear_int8",
    "num_threads",
    "pack_linear",
    "packs_linear",
    "paged_attention",
    "plan_batch",
    "quantise_int8",
    "restore_blocks",
    "rms_norm",
    "rope",
    "rope_and_store",
    "sample",
    "save_blocks",
    "set_num_threads",
    "silu_and_mul",
    "token_logprobs",
]

HostInts = NDArray[np.integer[Any]]


def num_threads() -> int:
    """CPU threads of the native kernels: as many as torch has, until `set_num_threads`."""
    return cpu_library.num_threads()


def set_num_threads(count: int, dtype: dtype) -> None:
    """CPU threads of the native kernels, and of torch where they leave it some of a
    forward's work in `dtype`; in the whole process.

    Elsewhere torch gets one: its threads go on spinning for milliseconds after a few numbers' cosine, on the
    cores that the next kernel wants (a step of 32 sequences took 40 ms instead of 32).
    """
    cpu_library.set_num_threads(count)
    torch.set_num_threads(1 if cpu_linear.serves(dtype) else count)


def plan_batch(
    layout: KVLayout,
    block_tables: HostInts,
    context_lens: HostInts,
    query_start: HostInts,
    slot_mapping: HostInts,
) -> BatchPlan:
    """What the reference's `kv_store` and `paged_attention` would else work out in every layer of a step. It
    is worked out when first asked for: the native kernels need none of it.

    Takes the same integers as those two, but on the host; what the plan holds lies on the layout's device.
    """
    return BatchPlan(layout, block_tables, context_lens, query_start, slot_mapping)


def kv_store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    plan: BatchPlan | None = None,
) -> None:
    """Writes the batch's keys and values into the cache, in place.

    `k`, `v` [T, Hkv, D], any strides; `k_cache`, `v_cache` [N, Hkv, B, D]; `slot_mapping` [T] int64: token t
    goes to slot `slot_mapping[t] % B` of block `slot_mapping[t] // B`. No slot comes twice. A slot below 0,
    of a row that only pads the batch, stores nothing.
    """
    if gpu.serves(k):
        gpu.kv_store.kv_store(k, v, k_cache, v_cache, slot_mapping)
        return
    if plan is None:
        block_size = kv_format.block_size(k_cache, k.shape[2])
        layout = KVLayout(k_cache.shape[1], block_size, None, k.device)
        rows = reference.plan.slot_rows(layout, np.asarray(slot_mapping.cpu(), np.int64))
    else:
        rows = plan.slot_rows
    reference.kv_store.kv_store(k, v, k_cache, v_cache, rows)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    plan: BatchPlan | None = None,
) -> Tensor:
    """Causal attention of the batch's queries over each sequence's keys in the cache (PagedAttention,
    arXiv 2309.06180). The batch's own keys must already be stored. Returns [T, Hq, D].

    - `q` [T, Hq, D], any strides; query heads [h * Hq / Hkv, (h + 1) * Hq / Hkv) use KV head h
    - `k_cache`, `v_cache` [N, Hkv, B, D]
    - `block_tables` [S, M] int32: position p of sequence s lies in block `block_tables[s, p // B]`, slot
      `p % B`. Entries that no position needs are ignored, and so is what lies in slots no query sees.
    - `context_lens` [S] int32: tokens of each sequence, the batch's own included; on a GPU 0 for one that
      only pads the batch, whose results are zeros
    - `query_start` [S + 1] int32: sequence s owns rows [query_start[s], query_start[s + 1]) of q, at least
      one, which are its last tokens
    - `window`: a query sees itself and the `window - 1` tokens before it; None is all of them
    - `soft_cap`: a score x becomes `soft_cap * tanh(x * scale / soft_cap)` (Gemma 2); None leaves it
    - `plan`: of the same integers and the same window. The reference makes one where none is given; the GPU's
      kernels then allow for any batch of these shapes, with a context as long as the block tables are wide:
      what a graph that is captured for later batches needs

    Raises ValueError on a GPU for blocks of other than 8, 16, 32, 64 or 128 tokens, heads of more than 256
    numbers, and quantised heads of no multiple of 4.
    """
    if gpu.serves(q):
        return gpu.paged_attention.paged_attention(
            q, k_cache, v_cache, block_tables, context_lens, query_start, scale, window, soft_cap, plan
        )
    lib = native(q)
    if lib is not None:
        integers = block_tables, context_lens, query_start
        if cpu_paged_attention.takes(q, k_cache, v_cache, *integers):
            return cpu_paged_attention.paged_attention(
                lib, q, k_cache, v_cache, *integers, scale, window, soft_cap
            )
    if plan is None:
        block_size = kv_format.block_size(k_cache, q.shape[2])
        layout = KVLayout(k_cache.shape[1], block_size, window, q.device)
        tables, lens, starts = (a.cpu().numpy() for a in (block_tables, context_lens, query_start))
        plan = plan_batch(layout, tables, lens, starts, np.empty(0, np.int64))
    assert plan.layout.window == window
    return reference.paged_attention.paged_attention(q, k_cache, v_cache, plan, scale, soft_cap)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (arXiv 1910.07467).

    `x` [T, H]; `weight` [H]. Returns [T, H].
    """
    if gpu.serves(x):
        return gpu.rms_norm.rms_norm(x, weight, eps)
    lib = native(x)
    if lib is not None and cpu_rms_norm.takes(x, weight):
        return cpu_rms_norm.rms_norm(lib, x, weight, eps)
    return reference.rms_norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum `x + residual`, and its norm as `rms_norm` defines it: returns (norm, sum), each [T, H].

    `x`, `residual` [T, H]; `weight` [H].
    """
    if gpu.serves(x):
        return gpu.rms_norm.add_rms_norm(x, residual, weight, eps)
    lib = native(x)
    if lib is not None and cpu_rms_norm.takes(x, weight, residual):
        return cpu_rms_norm.add_rms_norm(lib, x, residual, weight, eps)
    return reference.rms_norm.add_rms_norm(x, residual, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + D / 2) of each head by the token's angles (RoFormer, arXiv 2104.09864).

    `x` [T, heads, D], any strides; `cos`, `sin` [T, D] float32: both halves of a row hold the D / 2 angles,
    with the first half of `sin` negated, so the result is `x * cos + (x rotated by D / 2) * sin`.
    Returns [T, heads, D], computed in float32.
    """
    return reference.rope.rope(x, cos, sin)


def rope_and_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    plan: BatchPlan | None = None,
) -> Tensor:
    """`rope` of the queries and keys, and `kv_store` of the keys and values, in one pass. For a quantised
    cache queries and keys are spread in between (`kv_format.spread`).

    `qkv` [T, Hq + 2 Hkv, D] with `num_heads` = Hq: queries, keys, values; what it holds afterwards is
    undefined. The others are those of `rope` and `kv_store`. Returns the rotated queries [T, Hq, D], which
    may be a view of `qkv`.
    """
    if gpu.serves(qkv):
        return gpu.kv_store.rope_and_store(qkv, num_heads, cos, sin, k_cache, v_cache, slot_mapping)
    lib = native(qkv)
    if lib is not None and cpu_rope_store.takes(qkv, cos, sin, k_cache, v_cache, slot_mapping):
        return cpu_rope_store.rope_and_store(lib, qkv, num_heads, cos, sin, k_cache, v_cache, slot_mapping)
    num_rotated = num_heads + k_cache.shape[1]
    rotated = qkv[:, :num_rotated]
    if kv_format.is_quantised(k_cache.dtype):
        rotated = kv_format.spread(rope(rotated.float(), cos, sin))
    else:
        rotated = rope(rotated, cos, sin)
    kv_store(rotated[:, num_heads:], qkv[:, num_rotated:], k_cache, v_cache, slot_mapping, plan)
    return rotated[:, :num_heads].to(qkv.dtype)


def copy_blocks(cache: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies whole blocks within a cache. Every source is read before any destination is written.

    `cache` [P, N, E] uint8: P planes, a layer's keys or its values, of N blocks of E bytes. `sources` and
    `destinations` [C]; no destination comes twice.
    """
    if len(sources):
        _block_copy(cache).copy_blocks(cache, sources, destinations)


def save_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    """Copies what each of `blocks` [C] has in all planes of `cache` [P, N, E] uint8 to a row of `rows`
    [n, P, E] uint8, which is contiguous: block `blocks[i]` to row `indices[i]`. No row comes twice.

    `rows` may lie on the host and the cache on a device; if they are pinned, nothing waits for the copies.
    """
    if len(blocks):
        _block_copy(cache).save_blocks(cache, blocks, rows, indices)


def restore_blocks(cache: Tensor, blocks: Sequence[int], rows: Tensor, indices: Sequence[int]) -> None:
    """The reverse of `save_blocks`: row `indices[i]` to block `blocks[i]`. No block comes twice."""
    if len(blocks):
        _block_copy(cache).restore_blocks(cache, blocks, rows, indices)


def _block_copy(cache: Tensor) -> ModuleType:
    if gpu.serves(cache):
        return gpu.block_copy
    return cpu_block_copy if cache.is_cpu else reference.block_copy


def linear_best(x: Tensor, weight: PackedLinear | Int8Linear, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest outputs of each row of `linear` or `linear_int8`, without the others being written.

    `x` [T, K]; `count` from 1 to the number of outputs. Returns outputs [T, count] int64 and their values
    [T, count] float32, rounded as the product is, in falling order; equals in the order of outputs. Where
    fewer are above minus infinity, the last values are minus infinity; where one is a NaN, all are NaN.
    """
    if isinstance(weight, PackedLinear):
        return cpu_linear.best(x, weight, count)
    if weight.lib is not None and weight.packed is not None:
        return cpu_linear_int8.best(weight.lib, x, weight.packed, weight.out_features, count)
    return best_logits(linear_int8(x, weight), count)


def best_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What `linear_best` returns, of a product that is written already: `logits` [T, N]."""
    if count == 1:
        ids, values = best_token(logits)
        return ids[:, None], values[:, None]
    if gpu.serves(logits):
        return gpu.sampling.best(logits, count)
    return reference.sampling.best(logits, count)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202). `gate_up` [T, 2 I], gate first. Returns [T, I]."""
    if gpu.serves(gate_up):
        return gpu.activation.silu_and_mul(gate_up)
    lib = native(gate_up)
    if lib is not None and cpu_activation.takes(gate_up):
        return cpu_activation.silu_and_mul(lib, gate_up)
    return reference.activation.silu_and_mul(gate_up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` (GEGLU, arXiv 2002.05202), of GELU's approximation by a hyperbolic tangent (arXiv
    1606.08415). `gate_up` [T, 2 I], gate first. Returns [T, I]."""
    if gpu.serves(gate_up):
        return gpu.activation.gelu_and_mul(gate_up)
    return reference.activation.gelu_and_mul(gate_up)


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, the first of equals, and its logit.

    `logits` [R, V]. Returns ids [R] int64 and logits [R] float32; the logit is a NaN when any of its row is.
    """
    if gpu.serves(logits):
        return gpu.sampling.best_token(logits)
    lib = native(logits)
    if lib is not None and cpu_sampling.takes(logits):
        return cpu_sampling.best_token(lib, logits)
    return reference.sampling.best_token(logits)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Draws a token for each row from softmax(logits / temperature), cut down in vLLM's order: min-p keeps
    what is at least `min_p` times as probable as the best, then top-k the `top_k` best, then top-p the
    smallest set of the best with a share of at least `top_p` of what is left (the best is always kept).

    `logits` [R, V]; `temperature` [R] float32, above 0; `top_k` [R] int64, 0 is off; `top_p` [R] float32, 1
    is off; `min_p` [R] float32, 0 is off; `uniforms` [R] float64 in [0, 1), the row's only randomness.
    Returns ids [R] int64, which mean nothing for a row with a NaN or without a finite maximum, but are in [0,
    V). A row's result does not depend on the other rows.
    """
    columns = temperature, top_k, top_p, min_p, uniforms
    if gpu.serves(logits):
        return gpu.sampling.sample(logits, *columns)
    lib = native(logits)
    if lib is not None and cpu_sampling.takes_sample(logits, *columns):
        return cpu_sampling.sample(lib, logits, *columns)
    return reference.sampling.sample(logits, *columns)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_best: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities under softmax(logits) of one token a row, and of the `num_best` best.

    `logits` [R, V]; `token_ids` [R] int64. Returns the token's log-probability [R] float32 and rank [R]; ids
    [R, num_best] int64, log-probabilities and ranks of the best in falling order. The rank is one more than
    the number of tokens that are more probable, so that equals share one.
    """
    if gpu.serves(logits):
        return gpu.sampling.token_logprobs(logits, token_ids, num_best)
    lib = native(logits)
    if lib is not None and cpu_sampling.takes_token_logprobs(logits, token_ids, num_best):
        return cpu_sampling.token_logprobs(lib, logits, token_ids, num_best)
    return reference.sampling.token_logprobs(logits, token_ids, num_best)
