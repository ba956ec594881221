"""Our linear kernel against oneDNN's packed product, at SmolLM2-135M's shapes.

python kernels/bench/bench_linear.py --dtype bfloat16 --threads 2
"""

from collections.abc import Callable

import torch
from _bench import CACHE_BYTES, arguments, compare
from torch import Tensor

from octavo_kernels import ops

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ROWS = [1, 4, 8, 32, 64, 512, 2048]

Product = Callable[[Tensor], Tensor]  # of x [rows, inputs] with a weight


def compare_products(
    ours: Callable[[Tensor], Product],
    other: Callable[[Tensor], Product],
    dtype: torch.dtype,
    weight_bytes: int,
    turns: int,
    tolerance: float | None = None,
) -> None:
    """A line for each shape and number of rows. `ours` and `other` make a product of a weight of `dtype`:
    more products than a cache holds, at `weight_bytes` for a number of the weight."""
    for outputs, inputs in SHAPES:
        copies = max(1, CACHE_BYTES // (outputs * inputs * weight_bytes))
        weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(copies)]
        products = [[make(weight) for weight in weights] for make in (ours, other)]
        for rows in ROWS:
            if rows * outputs > 2048 * 3072:
                continue  # the head's rows are those that are sampled
            x = torch.randn(rows, inputs).to(dtype)

            def native(index: int, x: Tensor = x, made: list[Product] = products[0]) -> Tensor:
                return made[index](x)

            def others(index: int, x: Tensor = x, made: list[Product] = products[1]) -> Tensor:
                return made[index](x)

            with torch.inference_mode():
                compare(
                    f"{rows} x {outputs} x {inputs}",
                    native,
                    others,
                    copies if rows <= 64 else 1,
                    turns,
                    2e-9 * rows * outputs * inputs,
                    "GFLOP",
                    tolerance,
                )


def packed(weight: Tensor) -> Product:
    made = ops.pack_linear(weight)
    assert made is not None, "there is no native linear kernel for this CPU"
    return lambda x: ops.linear(x, made)


def onednn(weight: Tensor) -> Product:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")
        return product

    return multiply


def main() -> None:
    args = arguments(__doc__)
    dtype = getattr(torch, args.dtype)
    compare_products(packed, onednn, dtype, dtype.itemsize, args.turns)


if __name__ == "__main__":
    main()
