"""Octavo for Triton's Python backend: all of it is in the installed package."""

from octavo.serving.tritonserver import TritonPythonModel

__all__ = ["TritonPythonModel"]
