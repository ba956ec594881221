"""The largest outputs of a product, against the whole product."""

import pytest
import torch

from octavo_kernels import ops

SIZES = [(1, 1, 4), (2, 31, 8), (1, 33, 64), (7, 1000, 132), (33, 1537, 64), (193, 600, 32), (2, 20000, 8)]


def pack(matrix: torch.Tensor) -> ops.PackedLinear:
    packed = ops.pack_linear(matrix)
    assert packed is not None
    return packed


def weights(kind: str, outputs: int, inputs: int) -> tuple[ops.PackedLinear | ops.Int8Linear, torch.dtype]:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = torch.randn(outputs, inputs).to(dtype)
    if kind == "int8":
        return ops.quantise_int8(weight), dtype
    return pack(weight), dtype


def whole(x: torch.Tensor, weight: ops.PackedLinear | ops.Int8Linear) -> torch.Tensor:
    return ops.linear(x, weight) if isinstance(weight, ops.PackedLinear) else ops.linear_int8(x, weight)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_they_are_the_largest_of_the_whole_product(kind: str, rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    weight, dtype = weights(kind, outputs, inputs)
    x = torch.randn(rows, inputs).to(dtype)
    logits = whole(x, weight).float()
    for count in {1, min(5, outputs), min(64, outputs)}:
        ids, values = ops.linear_best(x, weight, count)
        expected, order = logits.sort(dim=-1, descending=True, stable=True)  # equals in the order of outputs
        assert torch.equal(values, expected[:, :count])
        assert torch.equal(ids, order[:, :count])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_row_with_a_nan_has_none(kind: str) -> None:
    weight, dtype = weights(kind, 1100, 64)
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = torch.nan
    ids, values = ops.linear_best(x, weight, 4)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()
    assert ((ids >= 0) & (ids < 1100)).all()


def test_one_nan_among_the_outputs_is_seen() -> None:
    matrix = torch.randn(1100, 64)
    matrix[1099, 3] = torch.nan
    assert ops.linear_best(torch.randn(2, 64), pack(matrix), 3)[1].isnan().all()


def test_nothing_above_minus_infinity() -> None:
    ids, values = ops.linear_best(torch.ones(1, 4), pack(torch.full((100, 4), -torch.inf)), 3)
    assert (values == -torch.inf).all()
    assert ((ids >= 0) & (ids < 100)).all()


def test_of_written_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [torch.nan, 1.0, 2.0, 0.0]])
    ids, values = ops.best_logits(logits, 3)
    assert ids[0].tolist() == [1, 2, 0]
    assert values[0].tolist() == [3.0, 3.0, 1.0]
    assert values[1].isnan().all()
    assert ops.best_logits(logits, 1)[0].tolist()[0] == [1]
