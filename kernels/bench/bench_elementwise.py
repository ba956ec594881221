"""The kernels between the products against the reference: norm, rotation with KV store, activation, argmax.

python kernels/bench/bench_elementwise.py --dtype bfloat16 --threads 2
"""

from collections.abc import Callable

import torch
from _bench import arguments, compare, reference
from torch import Tensor

from octavo_kernels import ops

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, BLOCK_SIZE = 576, 1536, 9, 3, 64, 49152, 16
COPIES = 20  # calls timed together


def kernels(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[int], Tensor]]:
    x, residual, weight = (torch.randn(n, HIDDEN).to(dtype) for n in (tokens, tokens, 1))
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE).to(dtype)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE).to(dtype)
    angles = torch.randn(tokens, HEAD_SIZE // 2)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    shape = (-(-tokens // BLOCK_SIZE), KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(shape[0] * BLOCK_SIZE)[:tokens]
    logits = torch.randn(min(tokens, 64), VOCAB).to(dtype)
    layout = ops.KVLayout(KV_HEADS, BLOCK_SIZE, None, x.device)
    integers = torch.zeros(tokens, 1), torch.ones(tokens), torch.arange(tokens + 1), slots
    plan = ops.plan_batch(layout, *(a.long().numpy() for a in integers))
    return {
        "add_rms_norm": lambda _: ops.add_rms_norm(x, residual, weight[0], 1e-5)[0],
        "silu_and_mul": lambda _: ops.silu_and_mul(gate_up),
        "rope_and_store": lambda _: ops.rope_and_store(qkv.clone(), HEADS, cos, sin, *caches, slots, plan),
        "best_token": lambda _: ops.best_token(logits)[1],
    }


def main() -> None:
    args = arguments(__doc__)
    for tokens in (1, 32, 2048):
        for name, run in kernels(tokens, getattr(torch, args.dtype)).items():
            with torch.inference_mode():
                compare(
                    f"{name}, {tokens} tokens",
                    run,
                    reference(run),
                    COPIES,
                    args.turns,
                    1e-6 * tokens,
                    "Mtoken",
                )


if __name__ == "__main__":
    main()
