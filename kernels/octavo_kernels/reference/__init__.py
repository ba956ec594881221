"""Plain torch twins of every kernel: the definition of right."""

from octavo_kernels.reference import (
    activation,
    block_copy,
    kv_store,
    linear_int8,
    paged_attention,
    plan,
    rms_norm,
    rope,
    sampling,
)

__all__ = [
    "activation",
    "block_copy",
    "kv_store",
    "linear_int8",
    "paged_attention",
    "plan",
    "rms_norm",
    "rope",
    "sampling",
]
