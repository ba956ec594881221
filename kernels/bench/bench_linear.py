"""Our linear kernel against oneDNN's packed product, at SmolLM2-135M's shapes.

python kernels/bench/bench_linear.py --dtype bfloat16 --threads 2
"""

import torch
from _bench import CACHE_BYTES, arguments, compare
from torch import Tensor

from octavo_kernels import ops

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
ROWS = [1, 4, 8, 32, 64, 512, 2048]


def main() -> None:
    args = arguments(__doc__)
    dtype = getattr(torch, args.dtype)
    for outputs, inputs in SHAPES:
        copies = max(1, CACHE_BYTES // (outputs * inputs * dtype.itemsize))
        weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(copies)]
        packed = [ops.pack_linear(weight) for weight in weights]
        reordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
        for rows in ROWS:
            if rows * outputs > 2048 * 3072:
                continue  # the head's rows are those that are sampled
            x = torch.randn(rows, inputs).to(dtype)

            def native(index: int, x: Tensor = x, packed: list[ops.PackedLinear | None] = packed) -> Tensor:
                weight = packed[index]
                assert weight is not None, "there is no native linear kernel for this CPU"
                return ops.linear(x, weight)

            def onednn(index: int, x: Tensor = x, reordered: list[Tensor] = reordered) -> Tensor:
                product: Tensor = torch.ops.mkldnn._linear_pointwise(
                    x, reordered[index], None, "none", [], ""
                )
                return product

            with torch.inference_mode():
                compare(
                    f"{rows} x {outputs} x {inputs}",
                    native,
                    onednn,
                    copies if rows <= 64 else 1,
                    args.turns,
                    2e-9 * rows * outputs * inputs,
                    "GFLOP",
                )


if __name__ == "__main__":
    main()
