"""Paged attention against the reference, over blocks in random order; with `--cache int8` or `fp8`, over a
quantised cache against one that is not. On a GPU where there is one, in the shapes of larger models.

python kernels/bench/bench_paged_attention.py --dtype bfloat16 --threads 2
python kernels/bench/bench_paged_attention.py --device cuda --heads llama2
"""

from functools import partial

import torch
from _bench import CACHE_BYTES, DEVICES, arguments, compare, reference
from torch import Tensor

from octavo_kernels import kv_format, ops

BLOCK_SIZE = 16
QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROUNDING = 0.05  # the relative error that three places of mantissa make of random numbers
HEADS = {"smollm2": (9, 3, 64), "llama3": (32, 8, 128), "llama2": (32, 32, 128)}  # Hq, Hkv, D
# Sequences, new tokens and context of each.
WORK = {
    "cpu": [(32, 1, 192), (1, 1, 200), (1, 1, 2000), (128, 1, 500), (8, 512, 512), (1, 256, 2048)],
    "cuda": [(64, 1, 4096), (256, 1, 512), (1, 1, 32768), (4, 2048, 2048), (1, 512, 16384)],
}


def quantised(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The same keys or values in a cache of type `dtype`."""
    num_kv_heads, head_size = cache.shape[1], cache.shape[3]
    shape = kv_format.block_shape(num_kv_heads, BLOCK_SIZE, head_size, dtype)
    made = torch.empty((len(cache), *shape), dtype=dtype, device=cache.device)
    tokens = cache.transpose(1, 2).flatten(0, 1)
    ops.kv_store(tokens, tokens, made, made, torch.arange(len(tokens), device=cache.device))
    return made


def main() -> None:
    names = ["smollm2", "llama3", "llama2"] if DEVICES[0] == "cpu" else ["llama3", "llama2", "smollm2"]
    args = arguments(__doc__, cache=["auto", *QUANTISED], device=DEVICES, heads=names)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    num_heads, num_kv_heads, head_size = HEADS[args.heads]
    for sequences, new, context in WORK[args.device]:
        blocks = -(-context // BLOCK_SIZE)
        shape = (sequences * blocks, num_kv_heads, BLOCK_SIZE, head_size)
        cache_bytes = 2 * sequences * blocks * BLOCK_SIZE * num_kv_heads * head_size * dtype.itemsize
        copies = min(30, max(1, CACHE_BYTES // cache_bytes))
        caches = [[torch.randn(shape, device=device).to(dtype) for _ in range(2)] for _ in range(copies)]
        smaller = caches
        if args.cache != "auto":
            smaller = [[quantised(cache, QUANTISED[args.cache]) for cache in pair] for pair in caches]
            cache_bytes = sum(cache.nbytes for cache in smaller[0])
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        contexts = torch.full((sequences,), context, dtype=torch.int32)
        starts = torch.arange(sequences + 1).int() * new
        q = torch.randn(sequences * new, num_heads, head_size).to(dtype).to(device)
        layout = ops.KVLayout(num_kv_heads, BLOCK_SIZE, None, device)
        no_slots = torch.empty(0, dtype=torch.int64)
        plan = ops.plan_batch(layout, *(a.numpy() for a in (tables, contexts, starts, no_slots)))
        amount, unit = cache_bytes * 1e-9, "GB"
        if device.type == "cuda" and new > 1:
            seen = sequences * (new * context - new * (new - 1) // 2)
            amount, unit = 4e-12 * seen * num_heads * head_size, "TFLOP"

        def attend(
            index: int,
            q: Tensor = q,
            caches: list[list[Tensor]] = smaller,
            integers: tuple[Tensor, ...] = tuple(a.to(device) for a in (tables, contexts, starts)),
            plan: ops.BatchPlan = plan,
        ) -> Tensor:
            return ops.paged_attention(q, *caches[index], *integers, q.shape[2] ** -0.5, plan=plan)

        with torch.inference_mode():
            compare(
                f"{sequences} x ({new} new of {context})",
                attend,
                reference(attend) if smaller is caches else partial(attend, caches=caches),
                copies,
                args.turns,
                amount,
                unit,
                None if smaller is caches else ROUNDING,
            )


if __name__ == "__main__":
    main()
