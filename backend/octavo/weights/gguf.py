"""Reads a GGUF file: its metadata, and its tensors' rows decoded to float32.

Owns the file format and nothing of any model: `weights.gguf_checkpoint` gives the tensors their Hugging
Face names, `engine.tokenizer` builds a tokenizer from the metadata. NumPy only.

The header is walked here rather than by the `gguf` package's `GGUFReader`, from which formats and block
sizes are taken: it makes an array for every string, 2.2 s for a vocabulary of 49,152 where this takes
0.06 s, and it trusts the lengths that it finds. Here every length is checked against what is left of the
file before anything is made of it, so that memory is bounded by the file's size whatever it claims.
The file is mapped, not read: tensor bytes are the page cache's.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from octavo.errors import WeightsError
from octavo.weights.gguf_quants import DECODERS, Bytes, Floats, dequantize

MAGIC = struct.pack("<I", GGUF_MAGIC)
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SMALLEST_ENTRY_BYTES = 13  # a key of no letters with a value of one byte: bounds the entries' number
_CHUNK_WEIGHTS = 2**18  # decoded at a time: 1 MiB of float32, which stays in a core's cache

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is row-major, [out, in] for a linear layer (GGUF stores it reversed)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    num_bytes: int


class GGUFFile:
    """An open file. Raises `WeightsError` that names the file and what is wrong with it.

    `metadata` holds Python scalars, strings and lists of strings; arrays of numbers are NumPy arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise self.error("it is empty")
            with path.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self.error(f"it cannot be opened: {error.strerror or error}") from None
        self._bytes: Bytes = np.frombuffer(mapped, np.uint8)
        header = _Header(self, memoryview(mapped))
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = header.tensors

    def error(self, reason: str, tensor: str | None = None) -> WeightsError:
        where = f"{self.path}, tensor '{tensor}'" if tensor else f"{self.path}"
        return WeightsError(f"GGUF file {where}: {reason}")

    def rows(self, name: str) -> Bytes:
        """The tensor as stored: [rows, bytes of a row], a view of the mapped file."""
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def decode(self, name: str, order: npt.NDArray[np.intp] | None = None) -> Iterator[tuple[int, Floats]]:
        """Yields (first row, float32 rows [k, in]) until all rows are out, in `order` when it is given.

        Every piece lies in the same buffer of about 1 MiB: use it before asking for the next.
        """
        tensor, rows = self.tensors[name], self.rows(name)
        step = max(1, _CHUNK_WEIGHTS // tensor.shape[-1])
        buffer = np.empty((min(step, len(rows)), tensor.shape[-1]), np.float32)
        for start in range(0, len(rows), step):
            end = min(start + step, len(rows))
            stored = rows[start:end] if order is None else rows[order[start:end]]
            decoded = buffer[: end - start]
            dequantize(stored, tensor.kind, decoded)
            yield start, decoded


class _Header:
    """One walk over the header. `_position` never passes the end of the file."""

    def __init__(self, file: GGUFFile, data: memoryview) -> None:
        self._file = file
        self._data = data
        self._size = len(data)
        self._position = 0
        self._what = "the header"  # what is being read, for the text of an error
        self._check_version()
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        for count, of in ((num_tensors, "tensors"), (num_entries, "metadata entries")):
            if count * _SMALLEST_ENTRY_BYTES > self._size:
                raise file.error(f"its header claims {count} {of}, more than its {self._size} bytes can hold")
        self.metadata: dict[str, Any] = {}
        for i in range(num_entries):
            self._what = f"metadata entry {i} of {num_entries}"
            key = self._string()
            self._what = f"metadata '{key[:80]}'"
            self.metadata[key] = self._value()
        parts = self.metadata.get("split.count", 1)
        if parts != 1:
            raise file.error(f"it is one of {parts} parts; join them first (llama.cpp's gguf-split --merge)")
        self.tensors: dict[str, GGUFTensor] = {}
        descriptions = [self._tensor(i, num_tensors) for i in range(num_tensors)]
        start = self._aligned()
        for name, kind, shape, offset in descriptions:
            self.tensors[name] = self._place(name, kind, shape, start + offset)

    def _check_version(self) -> None:
        magic = bytes(self._take(4))
        if magic != MAGIC:
            raise self._file.error(f"it is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise self._file.error(
                f"its version is {version}{' (a big-endian file)' if swapped else ''}; supported: 2 and 3, "
                "little-endian"
            )

    def _take(self, num_bytes: int) -> memoryview:
        end = self._position + num_bytes
        if end > self._size:
            raise self._file.error(
                f"cut short or corrupt: {self._what} needs {num_bytes} bytes at {self._position}, "
                f"the file ends at {self._size}"
            )
        data = self._data[self._position : end]
        self._position = end
        return data

    def _scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        try:
            return str(self._take(self._scalar("<Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise self._file.error(f"{self._what} is not UTF-8: {error.reason}") from None

    def _value(self) -> Any:
        number = self._scalar("<I")
        if number == GGUFValueType.STRING:
            return self._string()
        if number == GGUFValueType.ARRAY:
            return self._array()
        return self._scalar(self._layout(number))

    def _layout(self, number: int) -> str:
        layout = _SCALARS.get(number)  # type: ignore[call-overload]  # an IntEnum's keys are its numbers
        if layout is None:
            raise self._file.error(f"{self._what} has the unknown value type {number}")
        return str(layout)

    def _array(self) -> Any:
        number, count = self._scalar("<I"), self._scalar("<Q")
        if number == GGUFValueType.STRING:
            return self._strings(count)
        if number == GGUFValueType.ARRAY:
            raise self._file.error(f"{self._what} is an array of arrays, which is not supported")
        dtype = np.dtype(self._layout(number))
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).copy()

    def _strings(self, count: int) -> list[str]:
        """As `_string` many times, in one tight loop: vocabularies are long."""
        if count * 8 > self._size - self._position:
            raise self._file.error(f"cut short or corrupt: {self._what} claims {count} strings")
        data, position, length_of = self._data, self._position, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_of(data, position)[0]
                if position > self._size:
                    self._position = start
                    self._take(position - start)
                strings.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self._file.error(f"{self._what} is not UTF-8: {error.reason}") from None
        except struct.error:
            self._position = position
            self._take(8)
        self._position = position
        return strings

    def _tensor(self, i: int, total: int) -> tuple[str, int, tuple[int, ...], int]:
        self._what = f"the description of tensor {i} of {total}"
        name = self._string()
        num_dimensions = self._scalar("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._file.error(
                f"it has {num_dimensions} dimensions; allowed: 1 to {_MAX_DIMENSIONS}", name
            )
        shape = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))[::-1]
        return name, self._scalar("<I"), shape, self._scalar("<Q")

    def _aligned(self) -> int:
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._file.error(f"general.alignment is {alignment!r}; it must be a power of two")
        return -(-self._position // alignment) * alignment

    def _place(self, name: str, number: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        """Checks a tensor's description against the file. `offset` counts from the file's beginning."""
        if name in self.tensors:
            raise self._file.error("it occurs twice", name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._file.error(f"its type has the unknown number {number}", name) from None
        if kind not in DECODERS:
            known = ", ".join(k.name for k in DECODERS)
            raise self._file.error(f"its type is {kind.name}; supported: {known}", name)
        weights_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % weights_per_block:
            raise self._file.error(
                f"its shape is {list(shape)}; rows of {kind.name} hold a multiple of {weights_per_block} "
                "weights",
                name,
            )
        num_bytes = math.prod(shape) // weights_per_block * bytes_per_block
        if offset + num_bytes > self._size:
            raise self._file.error(
                f"cut short or corrupt: its shape is {list(shape)}, {num_bytes} bytes of {kind.name} at "
                f"{offset}, but the file ends at {self._size}",
                name,
            )
        return GGUFTensor(name, kind, shape, offset, num_bytes)
