"""Native `ops.best_token`; see there for shapes."""

import ctypes

import torch
from torch import Tensor

from octavo_kernels.cpu.library import TYPES


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
        torch.get_num_threads(),
    )
    return token_ids, best
