"""The kernels between the products against the reference: norm, rotation with KV store, activation, argmax;
in the shapes of SmolLM2-135M, or of Llama 3 8B on a GPU where there is one.

python kernels/bench/bench_elementwise.py --dtype bfloat16 --threads 2
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from _bench import DEVICES, arguments, compare, reference
from torch import Tensor

from octavo_kernels import ops

BLOCK_SIZE = 16
COPIES = 20  # calls timed together


class Model(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int


MODELS = {
    "cpu": Model(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_size=64, vocab=49152),
    "cuda": Model(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_size=128, vocab=128256),
}


def kernels(
    model: Model, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[int, Callable[[int], Tensor]]]:
    """With each, the bytes that it must read and write."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight = normal(tokens, model.hidden), normal(tokens, model.hidden), normal(model.hidden)
    gate_up = normal(tokens, 2 * model.intermediate)
    qkv = normal(tokens, model.heads + 2 * model.kv_heads, model.head_size)
    angles = torch.randn(tokens, model.head_size // 2, device=device)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    shape = (-(-tokens // BLOCK_SIZE), model.kv_heads, BLOCK_SIZE, model.head_size)
    caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(shape[0] * BLOCK_SIZE)[:tokens]
    logits = normal(min(tokens, 64), model.vocab)
    layout = ops.KVLayout(model.kv_heads, BLOCK_SIZE, None, device)
    integers = torch.zeros(tokens, 1), torch.ones(tokens), torch.arange(tokens + 1), slots
    plan = ops.plan_batch(layout, *(a.long().numpy() for a in integers))
    slots = slots.to(device)

    def rope_and_store(_: int) -> Tensor:
        return ops.rope_and_store(qkv.clone(), model.heads, cos, sin, *caches, slots, plan)

    return {
        "add_rms_norm": (
            4 * x.nbytes + weight.nbytes,
            lambda _: ops.add_rms_norm(x, residual, weight, 1e-5)[0],
        ),
        "silu_and_mul": (gate_up.nbytes * 3 // 2, lambda _: ops.silu_and_mul(gate_up)),
        "rope_and_store": (4 * qkv.nbytes + cos.nbytes + sin.nbytes, rope_and_store),  # and a copy of all
        "best_token": (logits.nbytes, lambda _: ops.best_token(logits)[1]),
    }


def main() -> None:
    args = arguments(__doc__, device=DEVICES)
    device = torch.device(args.device)
    for tokens in (1, 32, 2048):
        made = kernels(MODELS[args.device], tokens, getattr(torch, args.dtype), device)
        for name, (num_bytes, run) in made.items():
            with torch.inference_mode():
                compare(
                    f"{name}, {tokens} tokens",
                    run,
                    reference(run),
                    COPIES,
                    args.turns,
                    1e-9 * num_bytes,
                    "GB",
                )


if __name__ == "__main__":
    main()
