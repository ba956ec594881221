"""Which device a model instance computes on, by the instance group that Triton made it for.

Used by `tritonserver` before anything of torch is imported: a GPU is chosen by hiding the others from this
process, which CUDA reads once. Also used by `check`, which only says what would be chosen.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import Device
from octavo.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """`device` is the engine argument of that name, None to leave it as it is; `visible_devices` is what
    `CUDA_VISIBLE_DEVICES` has to become, None to leave that."""

    device: Device | None = None
    visible_devices: str | None = None


def place(
    kind: str,
    device_id: int,
    gpu_ids: tuple[int, ...],
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
) -> Placement:
    """For an instance of KIND_`kind`, with the device that Triton gave it and the parameter GPU_DEVICE_IDS.

    Triton numbers the GPUs that the server sees. Where the server itself runs under a mask, so does this
    process, and the numbers are places in that mask. Raises `ConfigError`.
    """
    asked = arguments.get("device", "auto")
    if kind == "CPU":
        if asked == "cuda":
            raise ConfigError(
                "the instance group is KIND_CPU, but 'device' is 'cuda'; use KIND_GPU or KIND_MODEL"
            )
        return Placement(device="cpu")
    if kind == "GPU" and asked != "cpu":
        return Placement("cuda", _unmasked(device_id, environ))
    if kind == "MODEL" and gpu_ids:
        if len(gpu_ids) > 1:
            raise ConfigError(
                f"parameter 'GPU_DEVICE_IDS' names {len(gpu_ids)} GPUs; allowed: one, since a model runs on "
                "one device in this version"
            )
        return Placement(None, _unmasked(gpu_ids[0], environ))
    return Placement()


def _unmasked(device_id: int, environ: Mapping[str, str]) -> str:
    """The name of the server's GPU of that number, for a mask of our own."""
    mask = environ.get(VISIBLE_DEVICES)
    if mask is None:
        return str(device_id)
    names = (name.strip() for name in mask.split(","))
    seen = list(itertools.takewhile(_is_shown, names))
    if device_id >= len(seen):
        raise ConfigError(
            f"the instance is to run on GPU {device_id}, but {VISIBLE_DEVICES} is {mask!r}, which shows "
            f"{len(seen)} of them"
        )
    return seen[device_id]


def _is_shown(name: str) -> bool:
    """CUDA hides what comes after a name that stands for no GPU, such as -1."""
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))
