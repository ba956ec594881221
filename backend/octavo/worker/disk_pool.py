"""The prefix cache's directory as the executor uses it: the copies between it and the device's KV blocks.

Which block goes where is for `engine/disk_blocks.py` to know; `disk_tier.py` has the files.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol import BlockFile, StepPlan
from octavo.weights.loader import Checkpoint
from octavo.worker.block_files import BlockFiles, Payload, least_bytes
from octavo.worker.disk_tier import DiskTier
from octavo.worker.kv_cache import KVCache
from octavo.worker.kv_identity import fingerprint

_CLOSE_S = 3.0  # to save what is in the cache when a server shuts down


class DiskPool:
    """`tier` is for any thread, the rest for the executor's."""

    def __init__(self, cache: KVCache, tier: DiskTier) -> None:
        self.tier = tier
        self._cache = cache

    def save(self, plan: StepPlan) -> None:
        """Before anything of the plan writes to a block: its discards and saves."""
        self._discard(plan.discards)
        self.tier.save([(digest, self._cache.content(block_id)) for digest, block_id in _named(plan.saves)])

    def load(self, plan: StepPlan) -> None:
        """Raises `LookupError` when a block is not there any more. It always is, for the plans of an engine:
        that holds what was read until the plan has run."""
        for digest, block_id in _named(plan.loads):
            self._cache.set_content(block_id, self.tier.take(digest))

    def close(self, keep: Iterable[BlockFile], discards: Iterable[str]) -> None:
        until_s = time.monotonic() + _CLOSE_S
        self._discard(discards)

        def missing() -> Iterable[tuple[bytes, Payload]]:
            for digest, block_id in _named(keep):
                if time.monotonic() >= until_s:
                    return
                if not self.tier.has(digest):
                    yield digest, self._cache.content(block_id)

        self.tier.save(missing(), until_s)
        self.tier.close(max(0.0, until_s - time.monotonic()))

    def _discard(self, discards: Iterable[str]) -> None:
        self.tier.discard(map(bytes.fromhex, discards))


def directory_bytes(config: EngineConfig, bytes_per_block: int) -> int:
    """What may lie in the prefix cache's directory, 0 where there is none. Raises `ConfigError` when next to
    nothing would."""
    if config.prefix_cache_dir is None:
        return 0
    most_bytes = int(config.prefix_cache_disk_gib * 2**30)
    least = least_bytes(bytes_per_block)
    if most_bytes < least:
        raise ConfigError(
            f"'prefix_cache_disk_gib' is {config.prefix_cache_disk_gib}; this model's KV blocks have "
            f"{bytes_per_block:,} bytes each, which takes {least / 2**30:.4f} and more",
            "prefix_cache_disk_gib",
        )
    return most_bytes


def open_disk_pool(
    config: EngineConfig,
    checkpoint: Checkpoint,
    cache: KVCache,
    bytes_per_block: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> DiskPool | None:
    """None without `prefix_cache_dir`. Raises `ConfigError` like `directory_bytes`."""
    most_bytes = directory_bytes(config, bytes_per_block)
    if config.prefix_cache_dir is None:
        return None
    identity = fingerprint(
        checkpoint,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        device=device,
    )
    files = BlockFiles(Path(config.prefix_cache_dir), most_bytes, identity, bytes_per_block)
    return DiskPool(cache, DiskTier(files))


def _named(blocks: Iterable[BlockFile]) -> Iterable[tuple[bytes, int]]:
    return ((bytes.fromhex(digest), block_id) for block_id, digest in blocks)
