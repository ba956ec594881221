"""What one forward reads. Passed down through every layer; nothing is kept in globals.

Made by `worker/model_input.py`. T tokens of S sequences in the batch, R rows to sample, B block size, M
blocks of the widest sequence.
"""

from dataclasses import dataclass

from torch import Tensor

from octavo_kernels import ops


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Where the batch's keys and values lie, for one group of layers that share block tables."""

    slot_mapping: Tensor  # [T] int64: block id x B + offset, where each token's K and V go
    query_start: Tensor  # [S + 1] int32: where each sequence's tokens begin
    context_lens: Tensor  # [S] int32: tokens of each sequence once this step is done
    block_tables: Tensor  # [S, M] int32
    plan: ops.BatchPlan  # worked out of the above, once for all layers


@dataclass(frozen=True, slots=True)
class ModelInput:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: tuple[AttentionInput, ...]  # by KV group
    sample_rows: Tensor  # [R] int64: the tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [N, Hkv, B, D], or quantised as `kv_format` has them."""

    k: Tensor
    v: Tensor
