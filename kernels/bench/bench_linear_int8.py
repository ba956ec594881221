"""Our int8 linear kernel against our bfloat16 one, at SmolLM2-135M's shapes.

python kernels/bench/bench_linear_int8.py --threads 2
"""

import torch
from _bench import arguments
from bench_linear import Product, compare_products, packed
from torch import Tensor

from octavo_kernels import ops

ROUNDING = 0.02  # the relative error that 8 bits on either side make of random numbers


def rounded(weight: Tensor) -> Product:
    made = ops.quantise_int8(weight)
    return lambda x: ops.linear_int8(x, made)


def main() -> None:
    args = arguments(__doc__)
    compare_products(rounded, packed, torch.bfloat16, 1, args.turns, ROUNDING)


if __name__ == "__main__":
    main()
