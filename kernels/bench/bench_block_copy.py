"""Copies of whole KV blocks against the reference: within the cache, to the host and back; in the shapes of
SmolLM2-135M, or of Llama 3 8B on a GPU where there is one.

python kernels/bench/bench_block_copy.py --threads 2
"""

from collections.abc import Callable
from types import ModuleType

import torch
from _bench import DEVICES, arguments, compare
from torch import Tensor

from octavo_kernels import ops, reference

# Keys and values of all layers, and the bytes that a block of 16 tokens has of one.
PLANES = {"cpu": (2 * 30, 3 * 16 * 64 * 2), "cuda": (2 * 32, 8 * 16 * 128 * 2)}
BLOCKS = 256
COPIES = 3  # calls timed together


class Blocks:
    """A cache, memory on the host, and which blocks go where. What is returned is a little of what was
    written, on the cache's device, whose own time is taken."""

    def __init__(self, device: str, count: int) -> None:
        num_planes, num_bytes = PLANES[device]
        self._cache = torch.randint(256, (num_planes, BLOCKS, num_bytes), dtype=torch.uint8, device=device)
        self._rows = torch.randint(256, (count, num_planes, num_bytes), dtype=torch.uint8)
        if device == "cuda":
            self._rows = self._rows.pin_memory()
        blocks = torch.randperm(BLOCKS).tolist()
        self._sources, self._destinations = blocks[:count], blocks[count : 2 * count]
        self._indices = list(range(count))

    def kernels(self, module: ModuleType) -> dict[str, Callable[[int], Tensor]]:
        cache, rows = self._cache, self._rows

        def copy(_: int) -> Tensor:
            module.copy_blocks(cache, self._sources, self._destinations)
            return cache[:, self._destinations[-1], ::64].double()

        def save(_: int) -> Tensor:
            module.save_blocks(cache, self._sources, rows, self._indices)
            return rows[-1].to(cache.device, non_blocking=True)[:, ::64].double()

        def restore(_: int) -> Tensor:
            module.restore_blocks(cache, self._destinations, rows, self._indices)
            return cache[:, self._destinations[-1], ::64].double()

        return {"copy": copy, "save": save, "restore": restore}


def main() -> None:
    args = arguments(__doc__, device=DEVICES)
    num_planes, num_bytes = PLANES[args.device]
    for count in (1, 32):
        blocks = Blocks(args.device, count)
        others = blocks.kernels(reference.block_copy)
        for name, run in blocks.kernels(ops).items():
            moved_gb = 1e-9 * count * num_planes * num_bytes
            compare(
                f"{name}, {count} blocks", run, others[name], COPIES, args.turns, moved_gb, "GB", tolerance=0
            )


if __name__ == "__main__":
    main()
