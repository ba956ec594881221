"""The products by AMX tiles, on any CPU with AVX-512: compiled for AMX, and run on tiles emulated in C."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from numerics import assert_close
from octavo_kernels import reference
from octavo_kernels.cpu import build, library
from octavo_kernels.cpu import linear as cpu_linear
from octavo_kernels.cpu import linear_int8 as cpu_linear_int8

EMULATED = ("-DOCTAVO_EMULATE_AMX", "-Werror")
ROWS = (1, 5, 16, 17, 32, 33, 63)
OUTPUTS = pytest.mark.parametrize("outputs", [31, 32, 33, 64, 97])
GUARD = 256  # numbers before and after a tensor that no kernel may use
needs_avx512 = pytest.mark.skipif(
    "avx512" not in library.supported(), reason="the emulated tiles are compiled with AVX-512"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for AMX itself; a warning is an error."""
    return build.build("amx", tmp_path_factory.mktemp("amx"), ("-Werror",))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library.load(build.build("avx512", tmp_path_factory.mktemp("emulated"), EMULATED))


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of NaNs, and the longer one of NaNs in whose middle it lies."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype)
    return whole[GUARD : GUARD + count].view(shape), whole


def guarded_copy(x: Tensor) -> Tensor:
    copy, _ = guarded(tuple(x.shape), x.dtype)
    return copy.copy_(x)


def assert_guard_is_whole(around: Tensor) -> None:
    assert around[:GUARD].isnan().all(), "something was written before the output"
    assert around[-GUARD:].isnan().all(), "something was written after the output"


def product(lib: ctypes.CDLL, x: Tensor, packed: Tensor, bias: Tensor, threads: int = 2) -> Tensor:
    x, (rows, inputs), outputs = guarded_copy(x), x.shape, len(bias)
    out, around = guarded((rows, outputs), x.dtype)
    pointers = (x.data_ptr(), packed.data_ptr(), bias.data_ptr(), out.data_ptr())
    lib.octavo_linear(*pointers, rows, outputs, inputs, library.TYPES[x.dtype], threads)
    assert_guard_is_whole(around)
    return out


def product_int8(lib: ctypes.CDLL, x: Tensor, parts: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
    x, (rows, inputs), outputs = guarded_copy(x), x.shape, len(bias)
    out, around = guarded((rows, outputs), x.dtype)
    pointers = [t.data_ptr() for t in (x, *parts, bias, out)]
    assert lib.octavo_linear_int8(*pointers, rows, outputs, inputs, library.TYPES[x.dtype], 2) == 0
    assert_guard_is_whole(around)
    return out


def only_row(x: Tensor, row: int) -> Tensor:
    """`x` with NaNs in all other rows."""
    alone = torch.full_like(x, torch.nan)
    alone[row] = x[row]
    return alone


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump to look into the object")
def test_the_kernels_for_amx_use_its_tiles(compiled: Path) -> None:
    code = subprocess.run(["objdump", "-d", str(compiled)], capture_output=True, text=True, check=True).stdout
    for instruction in ("ldtilecfg", "tdpbf16ps", "tdpbsud", "tilerelease"):
        assert instruction in code


def test_the_kernels_for_amx_ask_for_leave(compiled: Path) -> None:
    refusal = ctypes.CDLL(str(compiled)).octavo_start()
    if "amx" not in library.supported():
        assert refusal != 0
        with pytest.raises(OSError, match=r"the system does not let this process use AMX \(.+\)"):
            library.load(compiled)


@needs_avx512
@OUTPUTS
@pytest.mark.parametrize("inputs", [2, 4, 30, 62, 64, 66, 128, 130, 576])
def test_linear(outputs: int, inputs: int, emulated: ctypes.CDLL) -> None:
    weight = torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16()
    packed = guarded_copy(cpu_linear.pack(emulated, weight).packed)
    x = torch.randn(max(ROWS), inputs).bfloat16()
    expected = x.double() @ weight.double().T + bias.double()
    whole = product(emulated, x, packed, bias)
    assert_close("product", whole, expected)
    for rows in ROWS:
        part = product(emulated, x[:rows], packed, bias)
        assert torch.equal(part, whole[:rows]), f"{rows} rows differ from the same among {len(x)}"
    for row in (0, 20, 62):
        assert torch.equal(product(emulated, only_row(x, row), packed, bias)[row], whole[row])


@needs_avx512
@OUTPUTS
@pytest.mark.parametrize("inputs", [4, 28, 60, 64, 68, 124, 128, 132, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_int8(outputs: int, inputs: int, dtype: torch.dtype, emulated: ctypes.CDLL) -> None:
    plain = library.load(build.build("avx512"))
    weight, scales = reference.linear_int8.quantise(torch.randn(outputs, inputs))
    parts = cpu_linear_int8.pack(emulated, weight, scales)
    bias = torch.randn(outputs).to(dtype)
    x = torch.randn(max(ROWS), inputs).to(dtype)
    whole = product_int8(emulated, x, parts, bias)
    assert_close("product", whole, reference.linear_int8.linear(x, weight, scales, bias), 5e-3)
    assert_close("product, without tiles", whole, product_int8(plain, x, parts, bias))
    for rows in ROWS:
        part = product_int8(emulated, x[:rows], parts, bias)
        assert torch.equal(part, whole[:rows]), f"{rows} rows differ from the same among {len(x)}"
    for row in (0, 20, 62):
        assert torch.equal(product_int8(emulated, only_row(x, row), parts, bias)[row], whole[row])


@needs_avx512
@pytest.mark.parametrize("threads", [1, 3])
def test_more_rows_and_panels_than_a_task_takes(threads: int, emulated: ctypes.CDLL) -> None:
    weight, bias = torch.randn(1000, 576).bfloat16(), torch.zeros(1000).bfloat16()
    packed = cpu_linear.pack(emulated, weight).packed
    x = torch.randn(400, 576).bfloat16()
    whole = product(emulated, x, packed, bias, threads)
    assert_close("product", whole, x.double() @ weight.double().T)
    for rows in (192, 193, 225):
        assert torch.equal(product(emulated, x[:rows], packed, bias, threads), whole[:rows])


@needs_avx512
def test_int8_extremes_are_exact(emulated: ctypes.CDLL) -> None:
    """Both at the ends of their ranges: x at 127 and -127, the weight, as the tiles see it, at 255 and 1."""
    weight = torch.tensor([[127], [-127]], dtype=torch.int8).repeat(1, 576)
    parts = cpu_linear_int8.pack(emulated, weight, torch.ones(2))
    x = torch.tensor([[127.0], [-127.0]]).repeat(1, 576)
    whole = product_int8(emulated, x, parts, torch.zeros(2))
    most = 576.0 * 127 * 127
    assert whole.tolist() == [[most, -most], [-most, most]]


@needs_avx512
def test_bfloat16_denormals_are_zeros_to_tiles(emulated: ctypes.CDLL) -> None:
    x = torch.tensor([[2.0**-130, 0.0], [2.0**-126, 0.0]]).bfloat16()
    weight = torch.tensor([[2.0**120, 1.0]]).bfloat16()
    packed = cpu_linear.pack(emulated, weight).packed
    assert product(emulated, x, packed, torch.zeros(1).bfloat16()).tolist() == [[0.0], [2.0**-6]]
