"""The file format: what is read equals what the `gguf` package reads; whatever is broken is named."""

import random
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import WeightsError
from octavo.weights.gguf import GGUFFile

U32, F32, STRING, ARRAY = 4, 6, 8, 9
F32_TENSOR, Q4_0_TENSOR, IQ2_XXS_TENSOR = 0, 2, 16


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def described(name: str, dims: tuple[int, ...], kind: int = F32_TENSOR, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(
    entries: list[bytes],
    tensors: list[bytes],
    magic: bytes = b"GGUF",
    version: bytes = b"\3\0\0\0",
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    content = magic + version + counts + b"".join(entries) + b"".join(tensors)
    return content + b"\0" * (-len(content) % 32)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.scale", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.name", "Größe")
    writer.add_array("a.tokens", ["x", "", "ü", "long" * 50])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [1.5, -2.0])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    rows = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("two", gguf.quants.quantize(rows, q8_0), raw_dtype=q8_0)
    writer.add_tensor("three", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_package_reads(whole: Path) -> None:
    file, reader = GGUFFile(whole), gguf.GGUFReader(whole)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = file.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape[::-1]), tensor.name
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, ours.shape[-1])
        decoded = np.concatenate([rows.copy() for _, rows in file.decode(tensor.name)])
        assert np.array_equal(decoded, expected), tensor.name


def test_decodes_rows_in_any_order_and_in_chunks(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile(whole)
    everything = np.concatenate([rows.copy() for _, rows in file.decode("two")])
    monkeypatch.setattr("octavo.weights.gguf._CHUNK_WEIGHTS", 2 * 64)
    order = np.array([4, 0, 3, 1, 2])
    pieces = [(start, rows.copy()) for start, rows in file.decode("two", order)]
    assert [start for start, _ in pieces] == [0, 2, 4]
    assert np.array_equal(np.concatenate([rows for _, rows in pieces]), everything[order])


BROKEN = {
    "empty": (b"", "it is empty"),
    "not GGUF": (b"PK\3\4 something else", "it is not a GGUF file: it begins with b'PK"),
    "another magic": (header([], [], magic=b"GGML"), "it is not a GGUF file"),
    "version 1": (header([], [], version=b"\1\0\0\0"), "its version is 1; supported: 2 and 3"),
    "version 99": (header([], [], version=b"\x63\0\0\0"), "its version is 99"),
    "big-endian": (header([], [], version=b"\0\0\0\3"), "a big-endian file"),
    "2**60 tensors": (header([], [], num_tensors=2**60), f"claims {2**60} tensors"),
    "2**60 entries": (header([], [], num_entries=2**60), f"claims {2**60} metadata entries"),
    "a huge key": (header([struct.pack("<Q", 2**62)], []), "metadata entry 0 of 1 needs"),
    "a huge string": (
        header([entry("a.name", STRING, struct.pack("<Q", 2**62))], []),
        f"metadata 'a.name' needs {2**62} bytes",
    ),
    "a huge array of numbers": (
        header([entry("a.numbers", ARRAY, struct.pack("<IQ", U32, 2**61))], []),
        "metadata 'a.numbers' needs",
    ),
    "a huge array of strings": (
        header([entry("a.tokens", ARRAY, struct.pack("<IQ", STRING, 2**60))], []),
        f"metadata 'a.tokens' claims {2**60} strings",
    ),
    "a huge string in an array": (
        header([entry("a.tokens", ARRAY, struct.pack("<IQQ", STRING, 1, 2**62))], []),
        f"metadata 'a.tokens' needs {2**62} bytes",
    ),
    "an array that ends early": (
        header([], [], num_entries=1)[:24]
        + entry("a.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("x" * 9)),
        "metadata 'a.tokens' needs 8 bytes",
    ),
    "an array of arrays": (
        header([entry("a.nested", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 0))], []),
        "'a.nested' is an array of arrays",
    ),
    "an unknown value type": (header([entry("a.b", 77, b"\0" * 8)], []), "unknown value type 77"),
    "a string that is no UTF-8": (header([entry("a.b", STRING, text(b"\xff\xfe"))], []), "is not UTF-8"),
    "a key that is no UTF-8": (header([text(b"\xff") + b"\0" * 16], []), "is not UTF-8"),
    "strings that are no UTF-8": (
        header([entry("a.tokens", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))], []),
        "'a.tokens' is not UTF-8",
    ),
    "a bad alignment": (
        header([entry("general.alignment", U32, struct.pack("<I", 3))], [described("t", (4,))]),
        "general.alignment is 3; it must be a power of two",
    ),
    "part of a split file": (
        header([entry("split.count", U32, struct.pack("<I", 4))], []),
        "it is one of 4 parts",
    ),
    "a tensor cut off": (
        header([], [described("t.weight", (64, 4))]) + b"\0" * 1000,
        "tensor 't.weight': cut short or corrupt: its shape is [4, 64], 1024 bytes of F32 at",
    ),
    "a tensor far away": (
        header([], [described("t.weight", (4,), offset=2**63)]) + b"\0" * 16,
        "tensor 't.weight': cut short or corrupt",
    ),
    "a tensor beyond all sizes": (
        header([], [described("t.weight", (2**62, 2**62))]) + b"\0" * 64,
        "tensor 't.weight': cut short or corrupt",
    ),
    "an unknown tensor type": (
        header([], [described("t.weight", (32,), kind=999)]) + b"\0" * 128,
        "tensor 't.weight': its type has the unknown number 999",
    ),
    "an unsupported tensor type": (
        header([], [described("t.weight", (256,), kind=IQ2_XXS_TENSOR)]) + b"\0" * 128,
        "tensor 't.weight': its type is IQ2_XXS; supported: F32, F16, BF16, Q4_0",
    ),
    "a row that is no whole block": (
        header([], [described("t.weight", (33, 2), kind=Q4_0_TENSOR)]) + b"\0" * 128,
        "tensor 't.weight': its shape is [2, 33]; rows of Q4_0 hold a multiple of 32 weights",
    ),
    "a tensor of nothing": (
        header([], [described("t.weight", (0, 4))]) + b"\0" * 64,
        "tensor 't.weight': its shape is [4, 0]",
    ),
    "too many dimensions": (
        header([], [described("t.weight", (1,) * 9)]) + b"\0" * 64,
        "tensor 't.weight': it has 9 dimensions",
    ),
    "a tensor twice": (
        header([], [described("t.weight", (4,)), described("t.weight", (4,))]) + b"\0" * 64,
        "tensor 't.weight': it occurs twice",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_names_what_is_broken(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="it cannot be opened: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    end_of_tensors = max(t.offset + t.num_bytes for t in GGUFFile(whole).tensors.values())
    for length in range(0, end_of_tensors, 5):
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_a_file_with_flipped_bytes_is_read_or_refused(whole: Path, tmp_path: Path) -> None:
    """Never another exception, and never more memory than a file of this size is worth."""
    content, rng = whole.read_bytes(), random.Random(0)
    path = tmp_path / "flipped.gguf"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(500):
        flipped = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            flipped[rng.randrange(min(900, len(flipped)))] = rng.choice(
                [0, 1, 0x7F, 0xFF, rng.randrange(256)]
            )
        path.write_bytes(flipped)
        try:
            file = GGUFFile(path)
            for name in file.tensors:
                list(file.decode(name))
        except WeightsError:
            refused += 1
    assert 100 < refused < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024
