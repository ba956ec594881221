"""Octavo: an LLM serving engine inside NVIDIA Triton Inference Server.

`from octavo import Engine, SamplingParams` is the offline API; everything else is internal. `Engine` is
imported on first use, so that importing the package costs nothing and needs no torch.
"""

from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError
from octavo.request import Request, SamplingParams, TextDelta

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

__all__ = ["Engine", "OctavoError", "Request", "SamplingParams", "TextDelta"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from octavo.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'octavo' has no attribute '{name}'")
