"""The native CPU kernels against the reference, at odd sizes, on every instruction set of this machine."""

import threading
import time

import numpy as np
import pytest
import torch

from numerics import assert_close
from octavo_kernels import ops, reference
from octavo_kernels.cpu import library
from octavo_kernels.cpu import rope_store as cpu_rope_store

pytestmark = pytest.mark.usefixtures("native")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [1, 7, 33, 130])


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [1, 15, 16, 577, 2048])
def test_norms(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(tokens, size).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    assert_close("norm", ops.rms_norm(x, weight, 1e-5), reference.rms_norm.rms_norm(x, weight, 1e-5))
    actual = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close("norm of the sum", actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [1, 15, 4096, 4097])
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * size) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close("activation", ops.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("gate", [-200.0, -90.0, -87.5, 0.0, 90.0, 3e38, -3e38])
def test_silu_of_extreme_gates(gate: float) -> None:
    actual = ops.silu_and_mul(torch.tensor([[gate, 1.0]]))
    expected = gate if gate > 0 else 0.0
    assert abs(float(actual) - expected) <= 1e-35 + 1e-6 * abs(expected)


@DTYPES
def test_a_nan_stays_one(dtype: torch.dtype) -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    nans = bits.view(torch.float32).repeat(5).to(dtype)
    assert nans.isnan().all()
    x = torch.ones(1, 40).to(dtype)
    x[0, :20] = nans
    assert ops.rms_norm(x, torch.ones(40, dtype=dtype), 1e-5).isnan().all()
    assert ops.silu_and_mul(x).isnan().all()


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize("kv_heads", [1, 3, 7])
@pytest.mark.parametrize("head_size", [2, 16, 64, 80])
@pytest.mark.parametrize("block_size", [1, 8, 128])
def test_rope_and_store(
    tokens: int, kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    heads = 2 * kv_heads
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    angles = torch.randn(tokens, head_size // 2) * 50
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    shape = (-(-tokens // block_size) + 2, kv_heads, block_size, head_size)
    actual, expected = ([torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)] for _ in range(2))
    slots = torch.randperm(shape[0] * block_size)[:tokens]
    rotated = reference.rope.rope(qkv[:, : heads + kv_heads], cos, sin)
    ops.kv_store(rotated[:, heads:], qkv[:, heads + kv_heads :], *expected, slots)
    assert cpu_rope_store.takes(qkv, cos, sin, *actual, slots)
    q = ops.rope_and_store(qkv, heads, cos, sin, *actual, slots)
    assert_close("queries", q, rotated[:, :heads])
    written = ~expected[0].isnan()
    assert torch.equal(~actual[0].isnan(), written)
    assert_close("keys", actual[0][written], expected[0][written])
    assert torch.equal(actual[1].nan_to_num(-7.0), expected[1].nan_to_num(-7.0))


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 16, 17, 49152])
@pytest.mark.parametrize("rows", [1, 7])
def test_best_token(rows: int, size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, size).to(dtype)  # bfloat16 has equals
    ids, best = ops.best_token(logits)
    assert torch.equal(best, logits.float().amax(dim=-1))
    assert ids.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]


@DTYPES
@pytest.mark.parametrize("where", [0, 18, 36])
def test_a_nan_or_nothing_at_all_has_no_best_token(where: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 37).to(dtype)
    logits[1, where] = torch.nan
    logits[2] = -torch.inf
    ids, best = ops.best_token(logits)
    assert best.isnan().tolist() == [False, True, False]
    assert best[2] == -torch.inf
    assert 0 <= int(ids.min()) <= int(ids.max()) < 37


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (31, 64), (32, 66), (100, 200), (576, 1536)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(shape: tuple[int, int], biased: bool, dtype: torch.dtype, native: str) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = ops.pack_linear(weight)
    assert packed is not None
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    x = torch.randn(400, shape[1]).to(dtype)
    expected = x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    whole = ops.linear(x, packed, bias)
    assert_close("product", whole, expected)
    for tokens in [*range(1, 27), 192, 193]:  # every size of a block of rows, and two tiles
        part = ops.linear(x[:tokens], packed, bias)
        assert torch.equal(part, whole[:tokens]), f"{tokens} rows differ from the same among 400"


def test_linear_of_an_odd_number_of_inputs_is_left_to_others() -> None:
    assert ops.pack_linear(torch.randn(4, 7)) is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    x, gate_up = torch.randn(300, 257), torch.randn(300, 600)
    weight = torch.randn(257)
    expected = ops.rms_norm(x, weight, 1e-5), ops.silu_and_mul(gate_up)
    library.set_num_threads(threads)
    try:
        for _ in range(200):
            assert torch.equal(ops.rms_norm(x, weight, 1e-5), expected[0])
            assert torch.equal(ops.silu_and_mul(gate_up), expected[1])
    finally:
        library.set_num_threads(None)


def test_several_callers_at_once() -> None:
    lib = library.library()
    assert lib is not None
    gate_up = torch.randn(200, 1000)
    expected = ops.silu_and_mul(gate_up)
    wrong = []

    def call() -> None:
        for _ in range(200):
            out = torch.empty(200, 500)
            lib.octavo_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), 200, 500, 0, 3)
            if not torch.equal(out, expected):
                wrong.append(out)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_idle_threads_use_no_cpu() -> None:
    lib = library.library()
    assert lib is not None
    gate_up, out = torch.randn(200, 1000), torch.empty(200, 500)
    lib.octavo_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), 200, 500, 0, 4)
    time.sleep(0.05)
    used_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used_s < 0.03


@DTYPES
@pytest.mark.parametrize("shape", [(1, 4), (31, 64), (33, 68), (100, 200), (576, 1536)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_int8(shape: tuple[int, int], biased: bool, dtype: torch.dtype, native: str) -> None:
    dense = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    weight = ops.quantise_int8(dense)
    assert (weight.lib is not None) == (native != "avx2")
    rounded, scales = reference.linear_int8.quantise(dense)
    assert_close("weight", rounded * scales[:, None], dense, 0.01)
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    x = torch.randn(200, shape[1]).to(dtype)
    whole = ops.linear_int8(x, weight, bias)
    assert_close("product", whole, reference.linear_int8.linear(x, rounded, scales, bias), 5e-3)
    exact = x.double() @ dense.double().T
    assert_close("product, unquantised", whole, exact if bias is None else exact + bias, 0.02)
    if native != "avx2":  # torch's product is another with another number of rows
        for tokens in [1, 2, 7, 13, 33, 193]:
            assert torch.equal(ops.linear_int8(x[:tokens], weight, bias), whole[:tokens])


@DTYPES
def test_linear_int8_of_rows_that_are_nothing_or_not_finite(dtype: torch.dtype) -> None:
    dense = torch.randn(40, 36).to(dtype)
    dense[7] = 0.0
    weight = ops.quantise_int8(dense)
    x = torch.randn(5, 36).to(dtype)
    x[0] = 0.0
    x[1, 35] = torch.nan
    x[2, 3] = torch.inf
    x[3, 3] = -torch.inf
    product = ops.linear_int8(x, weight, None)
    assert (product[0] == 0).all()
    assert product[1:4].isnan().all()
    assert product[4].isfinite().all()
    assert product[4, 7] == 0
