"""Every block format against the `gguf` package's own decoder, bit for bit."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.weights.gguf_quants import DECODERS, dequantize

# Where the float16 scales stand in a block of a format that the package cannot quantise to.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def stored(kind: GGMLQuantizationType, rows: int, blocks_per_row: int) -> np.ndarray:
    """[rows, bytes of a row] of plausible data: real quantised numbers, or random bits with sane scales."""
    rng = np.random.default_rng(rows * 31 + blocks_per_row)
    weights, num_bytes = GGML_QUANT_SIZES[kind]
    if kind.name not in SCALES:
        values = rng.normal(size=(rows, blocks_per_row * weights)).astype(np.float32)
        return quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    blocks = rng.integers(0, 256, (rows * blocks_per_row, num_bytes), dtype=np.uint8)
    for offset in SCALES[kind.name]:
        scale = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks_per_row"), [(1, 1), (7, 3), (17, 5), (129, 2)])
def test_decodes_as_the_package_does(kind: GGMLQuantizationType, rows: int, blocks_per_row: int) -> None:
    data = stored(kind, rows, blocks_per_row)
    out = np.full((rows, blocks_per_row * GGML_QUANT_SIZES[kind][0]), np.nan, np.float32)
    dequantize(data, kind, out)
    expected = quants.dequantize(data, kind).reshape(out.shape)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32)), kind.name


def test_a_block_by_hand() -> None:
    """Q4_1: scale 0.5, minimum -1, byte i holds i in its low half and 15 - i in its high half."""
    halves = np.arange(16, dtype=np.uint8)
    scales = np.array([0.5, -1.0], np.float16).view(np.uint8)
    block = np.concatenate([scales, halves | ((15 - halves) << 4)])
    out = np.empty((1, 32), np.float32)
    dequantize(block[None], GGMLQuantizationType.Q4_1, out)
    assert out[0, :16].tolist() == [0.5 * i - 1 for i in range(16)]
    assert out[0, 16:].tolist() == [0.5 * (15 - i) - 1 for i in range(16)]


def test_covers_what_the_project_promises() -> None:
    promised = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K"
    assert {kind.name for kind in DECODERS} == set(promised.split())
