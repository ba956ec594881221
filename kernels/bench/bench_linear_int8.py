"""Our int8 linear kernel against our bfloat16 one, at SmolLM2-135M's shapes.

python kernels/bench/bench_linear_int8.py --threads 2
"""

import torch
from _bench import CACHE_BYTES, arguments, compare
from bench_linear import ROWS, SHAPES
from torch import Tensor

from octavo_kernels import ops

ROUNDING = 0.02  # the relative error that 8 bits on either side make of random numbers


def main() -> None:
    args = arguments(__doc__)
    for outputs, inputs in SHAPES:
        copies = max(1, CACHE_BYTES // (outputs * inputs))
        weights = [(torch.randn(outputs, inputs) / inputs**0.5).bfloat16() for _ in range(copies)]
        rounded = [ops.quantise_int8(weight) for weight in weights]
        packed = [ops.pack_linear(weight) for weight in weights]
        for rows in ROWS:
            if rows * outputs > 2048 * 3072:
                continue  # the head's rows are those that are sampled
            x = torch.randn(rows, inputs).bfloat16()

            def int8(index: int, x: Tensor = x, rounded: list[ops.Int8Linear] = rounded) -> Tensor:
                return ops.linear_int8(x, rounded[index])

            def bfloat16(index: int, x: Tensor = x, packed: list[ops.PackedLinear | None] = packed) -> Tensor:
                weight = packed[index]
                assert weight is not None, "there is no native linear kernel for this CPU"
                return ops.linear(x, weight)

            with torch.inference_mode():
                compare(
                    f"{rows} x {outputs} x {inputs}",
                    int8,
                    bfloat16,
                    copies if rows <= 64 else 1,
                    args.turns,
                    2e-9 * rows * outputs * inputs,
                    "GFLOP",
                    ROUNDING,
                )


if __name__ == "__main__":
    main()
