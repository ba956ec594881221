"""Reads what the prefix cache's directory has of a prompt, before the scheduler gets its request. Torch-free.

For any thread that can be kept waiting: a lane of `serving/intake.py`, or the caller of `Engine.generate`;
never the engine's. What comes too late, or not at all, is computed.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from octavo.engine.block_manager import BlockManager
from octavo.request import Request

_MOST_S = 1.0  # of reading for one request


class Directory(Protocol):
    """What is asked of the worker's `DiskTier`."""

    def has(self, digest: bytes) -> bool: ...
    def load(self, digests: Sequence[bytes], until_s: float) -> Sequence[object]: ...


class PrefixReader:
    def __init__(self, blocks: BlockManager, directory: Directory) -> None:
        self._blocks = blocks
        self._directory = directory

    def expects(self, request: Request) -> bool:
        """Whether `read` is likely to find anything. Takes no longer than to look for a file."""
        missing = self._blocks.missing(request)
        return bool(missing) and self._directory.has(missing[0])

    def read(self, request: Request) -> None:
        """Puts the content of the prompt's blocks into `request.stored`, as far as there are files: from the
        first on that neither the device nor the host has."""
        missing = self._blocks.missing(request)
        found = self._directory.load(missing, time.monotonic() + _MOST_S)
        request.stored.update(zip(missing, found, strict=False))
