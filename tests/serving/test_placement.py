"""Which device an instance gets: by its group's kind, by Triton's number for it, under a mask or not."""

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.serving.placement import VISIBLE_DEVICES, Placement, place


def placed(
    kind: str, device_id: int = 0, *gpu_ids: int, mask: str | None = None, **arguments: Any
) -> Placement:
    return place(kind, device_id, gpu_ids, arguments, {} if mask is None else {VISIBLE_DEVICES: mask})


def test_a_cpu_instance_computes_on_the_cpu() -> None:
    assert placed("CPU") == Placement("cpu")
    assert placed("CPU", device="cpu") == Placement("cpu")
    with pytest.raises(ConfigError, match="KIND_CPU, but 'device' is 'cuda'; use KIND_GPU or KIND_MODEL"):
        placed("CPU", device="cuda")


def test_a_gpu_instance_sees_the_gpu_that_triton_gave_it() -> None:
    assert placed("GPU", 1) == Placement("cuda", "1")
    assert placed("GPU", 1, device="cpu") == Placement()


def test_numbers_are_places_in_the_servers_own_mask() -> None:
    assert placed("GPU", 1, mask="2, 5") == Placement("cuda", "5")
    assert placed("GPU", 0, mask="GPU-1f2e") == Placement("cuda", "GPU-1f2e")
    with pytest.raises(
        ConfigError, match="on GPU 2, but CUDA_VISIBLE_DEVICES is '2,5', which shows 2 of them"
    ):
        placed("GPU", 2, mask="2,5")
    assert placed("GPU", 1, mask="MIG-a/0/1,GPU-b") == Placement("cuda", "GPU-b")


@pytest.mark.parametrize(
    ("mask", "seen"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("2,-1,5", 1), ("2,,5", 1), (" 2 , 5 ", 2)]
)
def test_a_mask_ends_at_what_is_no_gpu(mask: str, seen: int) -> None:
    """As it does for CUDA, so that no instance is put on a GPU that the server was not to touch."""
    if seen:
        assert placed("GPU", seen - 1, mask=mask).visible_devices == ("2", "5")[seen - 1]
    with pytest.raises(ConfigError, match=f"GPU {seen}, but .* which shows {seen} of them"):
        placed("GPU", seen, mask=mask)
    assert placed("CPU", mask=mask) == Placement("cpu")
    assert placed("MODEL", mask=mask) == Placement()


def test_a_model_instance_is_left_alone_unless_a_gpu_is_named() -> None:
    assert placed("MODEL", 3, mask="2,5") == Placement()
    assert placed("MODEL", 0, 1, mask="2,5") == Placement(None, "5")
    with pytest.raises(ConfigError, match="'GPU_DEVICE_IDS' names 2 GPUs; allowed: one"):
        placed("MODEL", 0, 0, 1)
