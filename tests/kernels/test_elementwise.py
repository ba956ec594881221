"""Norms, rotary embeddings and activations against float64, at odd sizes."""

import math

import pytest
import torch

from numerics import assert_close
from octavo_kernels import ops

pytestmark = pytest.mark.usefixtures("kernels")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 577), (33, 64)])
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
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(5, 37).to(dtype) for _ in range(2))
    weight = torch.randn(37).to(dtype)
    norm, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close("sum", total, x.double() + residual.double())
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close("norm", norm, expected)


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (7, 5, 10), (3, 12, 64)])
def test_rope(tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, heads + 1, size).to(dtype)[:, :heads]  # strided
    angles = torch.randn(tokens, size // 2) * 50
    cos, sin = angles.cos(), angles.sin()
    # A rotation is a product of complex numbers.
    pairs = torch.complex(x[..., : size // 2].double(), x[..., size // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    actual = ops.rope(x, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    assert actual.dtype == dtype
    assert_close("rotated", actual, expected)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (5, 33), (33, 128)])
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close("activation", ops.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (5, 33), (33, 128)])
def test_gelu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    assert_close("activation", ops.gelu_and_mul(gate_up), 0.5 * gate * (1 + tanh) * up)
