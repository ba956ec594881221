"""The last step of an embedding: a vector of unit length, as short as was asked for. Torch-free."""

import math
from collections.abc import Sequence


def embedding_of(pooled: Sequence[float], dimensions: int | None) -> tuple[float, ...] | None:
    """The first `dimensions` of a pooled vector (all if None), brought to length 1; to shorten a vector of
    length 1 and to bring it back to it is the same. None when the vector is unusable (a NaN)."""
    vector = pooled if dimensions is None else pooled[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in vector))
    if not math.isfinite(length):
        return None
    return tuple(value / length for value in vector) if length else tuple(vector)
