"""Norms and activations against float64, at odd sizes."""

import math

import pytest
import torch

from numerics import assert_close
from octavo_kernels import ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 577), (63, 64), (1000, 33), (2, 8191)])
def test_rms_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, size) * 3).to(dtype)
    weight = torch.randn(size).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close("norm", ops.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_sums_large_numbers_in_float32() -> None:
    x = torch.full((2, 9), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert_close("norm", ops.rms_norm(x, torch.ones(9, dtype=torch.float16), 1e-5), torch.ones(2, 9))


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 37), (63, 577)])
def test_add_rms_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(tokens, size).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    before = x.clone(), residual.clone()
    norm, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close("sum", total, x.double() + residual.double())
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close("norm", norm, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (5, 33), (63, 1025), (1000, 16)])
@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_activations(function: str, tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * size) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    if function == "silu":
        actual, share = ops.silu_and_mul(gate_up), 1 / (1 + (-gate).exp())
    else:
        actual = ops.gelu_and_mul(gate_up)
        share = 0.5 + 0.5 * torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    assert_close(function, actual, gate * share * up)


def test_gates_far_from_zero() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e10, 2.0, 2.0, 2.0, 2.0]])
    for activate in (ops.silu_and_mul, ops.gelu_and_mul):
        assert activate(gate_up).tolist() == [[0.0, 0.0, 400.0, pytest.approx(2e10)]]


def test_no_tokens_at_all() -> None:
    empty = torch.empty(0, 8)
    assert ops.rms_norm(empty, torch.ones(8), 1e-5).shape == (0, 8)
    assert [x.shape for x in ops.add_rms_norm(empty, empty, torch.ones(8), 1e-5)] == [(0, 8)] * 2
    assert ops.silu_and_mul(empty).shape == (0, 4)
