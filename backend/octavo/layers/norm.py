"""Root mean square norm."""

from collections.abc import Iterator

from torch import Tensor

from octavo.layers.linear import Placement
from octavo_kernels import ops


class RMSNorm:
    def __init__(self, size: int, eps: float, name: str, placement: Placement) -> None:
        self._weight = placement.empty(size)
        self._eps = eps
        self._name = name

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, H]. Returns [T, H]."""
        return ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and that sum, which is the next residual: each [T, H]."""
        return ops.add_rms_norm(x, residual, self._weight, self._eps)

    def fused(self) -> ops.Norm:
        """This layer for `ops.fuse_layers`."""
        return ops.Norm(self._weight, self._eps)

    def weight_map(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self._weight
