"""The GPU kernels by Triton's interpreter, on CPU tensors: only in a process with TRITON_INTERPRET=1, since
triton decides when a kernel is defined whether it will be interpreted or compiled. `tests/kernels/
test_interpreted.py` runs each file here in such a process."""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with NumPy, which warns of the infinities and NaNs that a GPU takes as they
    # come.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    # And it takes the one number of an array of one for the bounds of a loop.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` of a test is full of NaN, so that what a kernel forgets to write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
