"""Which tensors the GPU kernels take, told without a GPU."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from octavo_kernels import gpu

DEVICE = 0
obstacle = gpu._obstacle


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OCTAVO_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    monkeypatch.setattr(gpu, "_obstacle", lambda: None)
    gpu._serve.cache_clear()
    yield
    gpu._serve.cache_clear()


def of_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_that_is_new_enough(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    of_capability(monkeypatch, capability)
    assert gpu._serve(DEVICE)


def test_an_old_gpu_has_the_reference_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_capability(monkeypatch, (7, 5))
    assert not gpu._serve(DEVICE)
    assert not gpu._serve(DEVICE)
    assert caplog.messages == [
        "GPU kernels run as the slow torch reference: some card has compute capability 7.5, less than 8.0"
    ]


def test_without_triton_the_reference_serves_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not gpu._serve(DEVICE)
    assert caplog.messages == [
        "GPU kernels run as the slow torch reference: the package 'triton' is not installed"
    ]


def test_without_a_c_compiler_the_reference_serves_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        @property
        def driver(self) -> None:
            raise RuntimeError("Failed to find C compiler.")

    of_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(gpu, "_obstacle", obstacle)
    monkeypatch.setattr(importlib, "import_module", lambda name: Runtime())
    assert not gpu._serve(DEVICE)
    (line,) = caplog.messages
    assert line.startswith("GPU kernels run as the slow torch reference: Triton cannot build")
    assert line.endswith("needs a C compiler and Python's headers: RuntimeError: Failed to find C compiler.")


def test_the_reference_can_be_forced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_capability(monkeypatch, (9, 0))
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    assert not gpu._serve(DEVICE)
    assert caplog.messages == []


def test_tensors_on_a_cpu_are_for_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert not gpu.serves(x)
    monkeypatch.setattr(gpu, "INTERPRETED", True)
    assert gpu.serves(x)


def test_a_cpu_needs_no_triton() -> None:
    program = """
import sys, torch
sys.modules["triton"] = None  # an import of it fails
from octavo_kernels import gpu, ops
ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
ops.best_token(torch.ones(2, 8))
assert not [name for name in sys.modules if name.startswith("octavo_kernels.gpu.")]
try:
    gpu.rms_norms
except AttributeError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "module 'octavo_kernels.gpu' has no attribute 'rms_norms'\n"
