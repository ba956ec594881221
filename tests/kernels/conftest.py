"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch

from octavo_kernels.cpu import library


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` of a test is full of NaN, so that what a kernel forgets to write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=library.supported())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an instruction set of this CPU, whose kernels the test runs with."""
    yield from _forced(request.param, monkeypatch)


@pytest.fixture(params=["reference", *library.supported()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same, and the reference."""
    yield from _forced(request.param, monkeypatch)


def _forced(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OCTAVO_KERNELS", name)
    library.library.cache_clear()
    assert (library.library() is None) == (name == "reference"), f"the kernels '{name}' could not be had"
    yield name
    library.library.cache_clear()
