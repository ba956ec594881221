"""Native paged attention against the reference, with SmolLM2-135M's heads and blocks in random order; with
`--cache int8` or `fp8`, over a quantised cache against one that is not.

python kernels/bench/bench_paged_attention.py --dtype bfloat16 --threads 2
"""

from functools import partial

import torch
from _bench import CACHE_BYTES, arguments, compare, reference
from torch import Tensor

from octavo_kernels import kv_format, ops

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROUNDING = 0.05  # the relative error that three places of mantissa make of random numbers
WORK = [(32, 1, 192), (1, 1, 200), (1, 1, 2000), (128, 1, 500), (8, 512, 512), (1, 256, 2048)]


def quantised(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The same keys or values in a cache of type `dtype`."""
    size = len(cache), *kv_format.block_shape(KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype)
    made = torch.empty(size, dtype=dtype)
    tokens = cache.transpose(1, 2).flatten(0, 1)
    ops.kv_store(tokens, tokens, made, made, torch.arange(len(tokens)))
    return made


def main() -> None:
    args = arguments(__doc__, cache=["auto", *QUANTISED])
    dtype = getattr(torch, args.dtype)
    for sequences, new, context in WORK:
        blocks = -(-context // BLOCK_SIZE)
        shape = (sequences * blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        cache_bytes = 2 * sequences * blocks * BLOCK_SIZE * KV_HEADS * HEAD_SIZE * dtype.itemsize
        copies = min(30, max(1, CACHE_BYTES // cache_bytes))
        caches = [[torch.randn(shape).to(dtype) for _ in range(2)] for _ in range(copies)]
        smaller = caches
        if args.cache != "auto":
            smaller = [[quantised(cache, QUANTISED[args.cache]) for cache in pair] for pair in caches]
            cache_bytes = sum(cache.nbytes for cache in smaller[0])
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        contexts = torch.full((sequences,), context, dtype=torch.int32)
        starts = torch.arange(sequences + 1).int() * new
        q = torch.randn(sequences * new, HEADS, HEAD_SIZE).to(dtype)
        layout = ops.KVLayout(KV_HEADS, BLOCK_SIZE, None, q.device)
        no_slots = torch.empty(0, dtype=torch.int64)
        plan = ops.plan_batch(layout, *(a.numpy() for a in (tables, contexts, starts, no_slots)))

        def attend(
            index: int,
            q: Tensor = q,
            caches: list[list[Tensor]] = smaller,
            integers: tuple[Tensor, ...] = (tables, contexts, starts),
            plan: ops.BatchPlan = plan,
        ) -> Tensor:
            return ops.paged_attention(q, *caches[index], *integers, HEAD_SIZE**-0.5, plan=plan)

        with torch.inference_mode():
            compare(
                f"{sequences} x ({new} new of {context})",
                attend,
                reference(attend) if smaller is caches else partial(attend, caches=caches),
                copies,
                args.turns,
                cache_bytes * 1e-9,
                "GB",
                None if smaller is caches else ROUNDING,
            )


if __name__ == "__main__":
    main()
