"""Native `ops.best_token`, `ops.sample` and `ops.token_logprobs`; see there for shapes."""

import ctypes

import torch
from torch import Tensor

from octavo_kernels.cpu.library import TYPES, num_threads


def takes(logits: Tensor) -> bool:
    return logits.is_contiguous() and logits.shape[-1] > 0


def best_token(lib: ctypes.CDLL, logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab_size = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    best = torch.empty(rows, dtype=torch.float32)
    lib.octavo_best_token(
        logits.data_ptr(),
        token_ids.data_ptr(),
        best.data_ptr(),
        rows,
        vocab_size,
        TYPES[logits.dtype],
        num_threads(),
    )
    return token_ids, best


def takes_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> bool:
    columns = temperature, top_k, top_p, min_p, uniforms
    return (
        logits.shape[-1] > 0
        and temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
        and top_k.dtype == torch.int64
        and uniforms.dtype == torch.float64
        and all(column.is_contiguous() for column in columns)
    )


def sample(
    lib: ctypes.CDLL,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    logits = _in_rows(logits)
    rows, vocab_size = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    failed = lib.octavo_sample(
        logits.data_ptr(),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        uniforms.data_ptr(),
        token_ids.data_ptr(),
        rows,
        logits.stride(0),
        vocab_size,
        TYPES[logits.dtype],
        num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to order {vocab_size} logits")
    return token_ids


def takes_token_logprobs(logits: Tensor, token_ids: Tensor, num_best: int) -> bool:
    return (
        logits.shape[-1] > 0
        and token_ids.dtype == torch.int64
        and token_ids.is_contiguous()
        and 0 <= num_best <= logits.shape[-1]
    )


def token_logprobs(
    lib: ctypes.CDLL, logits: Tensor, token_ids: Tensor, num_best: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits = _in_rows(logits)
    rows, vocab_size = logits.shape
    logprobs = torch.empty(rows, dtype=torch.float32)
    ranks = torch.empty(rows, dtype=torch.int64)
    best_ids, best_ranks = (torch.empty(rows, num_best, dtype=torch.int64) for _ in range(2))
    best = torch.empty(rows, num_best, dtype=torch.float32)
    failed = lib.octavo_token_logprobs(
        logits.data_ptr(),
        token_ids.data_ptr(),
        logprobs.data_ptr(),
        ranks.data_ptr(),
        best_ids.data_ptr(),
        best.data_ptr(),
        best_ranks.data_ptr(),
        num_best,
        rows,
        logits.stride(0),
        vocab_size,
        TYPES[logits.dtype],
        num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to order {vocab_size} logits")
    return logprobs, ranks, best_ids, best, best_ranks


def _in_rows(logits: Tensor) -> Tensor:
    """With each row contiguous; the rows need not follow one another, and may be one and the same."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()
