"""The machine that `peers.py` runs on: what it is, and how fast it reads memory."""

import datetime
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_READ_BYTES = 1 << 30  # far more than any cache holds


def cores() -> list[int]:
    """The numbers of those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def find_tcmalloc() -> Path | None:
    """The allocator that vLLM's documentation advises to preload."""
    for folder in LIBRARY_FOLDERS:
        for path in sorted(Path("/").glob(f"{folder[1:]}/libtcmalloc_minimal.so.4")):
            return path
    return None


def describe() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(cores()),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class MemoryReader:
    """Reads a large array with all cores."""

    def __init__(self) -> None:
        self._array = torch.ones(_READ_BYTES // 4)

    def bytes_per_s(self) -> float:
        start_s = time.perf_counter()
        self._array.sum()
        return _READ_BYTES / (time.perf_counter() - start_s)
