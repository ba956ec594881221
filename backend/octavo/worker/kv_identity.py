"""What two instances must have in common to use each other's KV blocks: a fingerprint.

Used where the worker opens the prefix cache's directory. It need not tell what is in a block's own digest:
the tokens, and whose they are.
"""

import json
from hashlib import blake2b
from pathlib import Path

import torch

from octavo.weights.files import sample_digest
from octavo.weights.loader import Checkpoint

# To be raised whenever the same tokens come to have other bytes, in another place, or in other files.
_LAYOUT_VERSION = 2


def fingerprint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    quantization: str | None,
    block_size: int,
    device: torch.device,
) -> bytes:
    """16 bytes that are others for another model, or for one that is computed or kept otherwise. Raises
    `OSError`.

    Of each file of weights, which is too large to be read whole, count its name, size and time of
    modification, and a sample of its bytes: not all systems that copy files give them a time.
    """
    digest = blake2b(digest_size=16)
    how = [_LAYOUT_VERSION, str(dtype), str(kv_dtype), quantization, block_size, device.type]
    digest.update(json.dumps([how, checkpoint.config()], sort_keys=True, default=str).encode())
    for path in _weight_files(checkpoint.path):
        status = path.stat()
        what = [path.name, status.st_size, status.st_mtime_ns, sample_digest(path)]
        digest.update(json.dumps(what).encode())
    return digest.digest()


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
