"""The forward of decode steps as CUDA graphs: one launch instead of hundreds.

A graph is captured for each of a few sizes of batch, with the addresses of what it reads: the place where
`worker.transfers` puts a step's arrays, which is the same for all steps of one size, and block tables of its
own. Owned by the model runner. Why it is so: ADR 11.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.layers.inputs import AttentionInput, ModelInput
from octavo.worker.gpu import Captured, Gpu
from octavo_kernels import ops

log = logging.getLogger("octavo")

_FIRST_SIZES = (1, 2, 4)
_STEP, _FAR_STEP = 8, 32  # between sizes, up to and above so many sequences:
_FAR = 128

Forward = Callable[[ModelInput], Tensor]


def decode_sizes(config: EngineConfig) -> tuple[int, ...]:
    """The sizes of batch that are captured, rising; none with `enforce_eager`.

    A row of padding costs its part of the products, which hardly counts while reading the weights takes
    longer, and no attention: eight sizes to the next multiple of 64 are enough. `max_num_seqs` is one, so
    that every decode step has a graph.
    """
    if config.enforce_eager:
        return ()
    most = config.max_num_seqs
    if config.cudagraph_capture_sizes is not None:
        return tuple(sorted({size for size in config.cudagraph_capture_sizes if size <= most}))
    sizes = (*_FIRST_SIZES, *range(_STEP, _FAR, _STEP), *range(_FAR, most, _FAR_STEP))
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs:
    def __init__(
        self,
        gpu: Gpu,
        forward: Forward,
        sizes: Sequence[int],
        layouts: Sequence[ops.KVLayout],
        max_model_len: int,
    ) -> None:
        """`forward` returns hidden states [T, H]. `layouts` are the KV cache's, by KV group."""
        self._gpu = gpu
        self._forward = forward
        self.sizes = tuple(sizes)
        self._layouts = layouts
        self._max_model_len = max_model_len
        width = -(-max_model_len // layouts[0].block_size)
        most = max(sizes, default=0)
        self._block_tables = torch.zeros((most, width), dtype=torch.int32, device=gpu.device)
        self._pool = gpu.graph_pool()
        self._graphs: dict[int, tuple[Captured, ModelInput]] = {}  # by size, with what it reads

    def takes(self, inputs: ModelInput) -> bool:
        """Whether this is a decode step of one of the sizes."""
        size = len(inputs.input_ids)
        return len(inputs.attention[0].context_lens) == size and size in self.sizes

    def run(self, inputs: ModelInput) -> Tensor:
        """The hidden states [S, H], which the next call may overwrite. Captures a size that is new."""
        size = len(inputs.input_ids)
        tables = inputs.attention[0].block_tables
        # What stands to the right is of other steps, and is never read: no position needs it.
        self._block_tables[:size, : tables.shape[1]].copy_(tables)
        if size not in self._graphs:
            return self._first_run(inputs)
        captured, reads = self._graphs[size]
        assert _addresses(inputs) == _addresses(reads), "a step's arrays lie elsewhere than when captured"
        captured.replay()
        return captured.output

    def _first_run(self, inputs: ModelInput) -> Tensor:
        """Computes one kernel after the other, which also compiles and loads them, and captures the same."""
        size = len(inputs.input_ids)
        attention = map(self._for_any_context, inputs.attention, self._layouts)
        reads = replace(inputs, attention=tuple(attention))
        hidden = self._forward(reads)
        try:
            self._graphs[size] = self._gpu.capture(lambda: self._forward(reads), self._pool), reads
        except Exception as error:
            log.warning(
                "CUDA graphs are off, so decode steps wait for the CPU: capturing %d rows failed: %s: %s",
                size,
                type(error).__name__,
                error,
            )
            self.sizes = ()
            self._graphs.clear()
        return hidden

    def _for_any_context(self, batch: AttentionInput, layout: ops.KVLayout) -> AttentionInput:
        """The same, launched for the longest context there may be, with block tables that stay."""
        size = len(batch.context_lens)
        plan = ops.plan_batch(
            layout,
            np.zeros((size, self._block_tables.shape[1]), np.int32),
            np.full(size, self._max_model_len),
            np.arange(size + 1),
            np.full(size, -1),
        )
        return replace(batch, block_tables=self._block_tables[:size], plan=plan)


def _addresses(inputs: ModelInput) -> tuple[int, ...]:
    batch = inputs.attention[0]
    tensors = inputs.input_ids, inputs.positions, batch.slot_mapping, batch.query_start, batch.context_lens
    return tuple(tensor.data_ptr() for tensor in tensors)
