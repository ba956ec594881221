"""How close two tensors are, said with the tensor's name."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp_min(1e-30))


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Equal shapes, no NaN, and a relative error (2-norm) within the tolerance of the actual's dtype."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} NaNs"
    limit = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = relative_error(actual, expected)
    assert error <= limit, f"{name}: relative error {error:.2e}, allowed {limit:.0e}"
