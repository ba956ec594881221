"""The GPU's attention by Triton's interpreter, against float64 at odd sizes, with every unused slot a NaN.

The interpreter multiplies in float32, so that a cache's own type is what results are as exact as.
"""

import pytest
import torch

from numerics import assert_close
from octavo_kernels.gpu import chips
from octavo_kernels.gpu import paged_attention as gpu
from paged_batches import Batch, make_batch

MIXED = [(1, 1), (7, 7), (1, 33), (5, 29), (1, 130), (70, 150), (2, 17), (1, 64)]  # new tokens, context
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
QUANTISED = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that each launch of `decode` was given."""
    given: list[int] = []
    chosen = gpu._splits

    def splits(programs: int, keys: int, cores: int) -> int:
        given.append(chosen(programs, keys, cores))
        return given[-1]

    monkeypatch.setattr(gpu, "_splits", splits)
    return given


@pytest.mark.parametrize(
    ("heads", "block_size", "planned"),
    [
        ((7, 7, 64), 8, True),
        ((3, 1, 64), 16, False),
        ((9, 3, 80), 32, True),
        ((4, 1, 96), 64, False),
        ((6, 3, 112), 16, False),
        ((14, 2, 128), 128, True),
        ((3, 3, 128), 16, False),
        ((5, 1, 256), 16, True),
        ((2, 1, 256), 128, False),
        ((1, 1, 10), 8, True),  # fewer numbers than a product takes
        ((20, 1, 16), 64, True),  # more heads to a KV head than a tile has rows
    ],
    ids=str,
)
def test_a_mixed_batch(heads: tuple[int, int, int], block_size: int, planned: bool) -> None:
    batch = make_batch(MIXED, heads, block_size)
    assert_close("attention", batch.attend(planned), batch.expected())


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_types(dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, (6, 2, 128), 16, dtype)
    assert_close("attention", batch.attend(True), batch.expected())


@pytest.mark.parametrize("window", [1, 20, 64, 100])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_window_and_soft_cap(window: int, soft_cap: float | None) -> None:
    batch = make_batch(MIXED, (6, 2, 16), dtype=torch.bfloat16)
    actual = batch.attend(planned=True, window=window, soft_cap=soft_cap)
    assert_close("attention", actual, batch.expected(window, soft_cap))


def test_a_soft_cap_over_all_keys() -> None:
    batch = make_batch(MIXED)
    assert_close("attention", batch.attend(soft_cap=0.7), batch.expected(soft_cap=0.7))


@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=str)
def test_blocks_before_the_window_need_not_exist(cache: torch.dtype) -> None:
    batch = make_batch(MIXED, (2, 1, 64), cache=cache)
    for table, (new, context) in zip(batch.block_tables, MIXED, strict=True):
        table[: max(context - new + 1 - 20, 0) // 8] = 2**31 - 1
    assert_close("attention", batch.attend(planned=True, window=20), batch.expected(window=20))


@pytest.mark.parametrize("cache", QUANTISED, ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [((9, 3, 64), 16, None), ((2, 2, 80), 8, 33), ((4, 1, 128), 128, None), ((2, 1, 256), 32, 7)],
    ids=str,
)
def test_a_quantised_cache(
    heads: tuple[int, int, int], block_size: int, window: int | None, cache: torch.dtype
) -> None:
    batch = make_batch(MIXED, heads, block_size, cache=cache)
    assert_close("attention", batch.attend(planned=True, window=window), batch.expected(window))


@pytest.mark.parametrize("cache", QUANTISED, ids=str)
def test_every_byte_of_a_quantised_cache(cache: torch.dtype) -> None:
    """One key to a sequence, so that the result is its value: number times scale."""
    values = torch.arange(256, dtype=torch.uint8).view(cache)
    values = values[~values.float().isnan()]
    batch = make_batch([(1, 1)], (1, 1, 256), cache=cache)
    row = torch.zeros(256, dtype=torch.uint8).view(cache)
    row[: len(values)] = values
    numbers = batch.v_cache.view(torch.uint8)[int(batch.block_tables[0, 0]), 0, :256]
    numbers.copy_(row.view(torch.uint8))
    scale = batch.values[0].abs().max() / (127 if cache == torch.int8 else 448)
    expected = row.float() * scale.bfloat16().float()
    assert_close("values", batch.attend()[0, 0], expected, tolerance=1e-7)


@pytest.mark.parametrize("cores", [1, 16, 10_000])
@pytest.mark.parametrize("window", [None, 700])
def test_split_keys(
    cores: int, window: int | None, splits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "num_cores", lambda device: cores)
    monkeypatch.setattr(gpu, "_PROGRAMS_PER_CORE", 1)
    monkeypatch.setattr(gpu, "_LEAST_SHARE", 10)  # of more splits than have a key
    batch = make_batch([(1, 1000), (1, 3), (3, 40), (1, 513), (1, 128)], (3, 1, 64), 16)
    assert_close("attention", batch.attend(planned=True, window=window), batch.expected(window))
    assert splits == [{1: 1, 16: 4, 10_000: 77 if window else 100}[cores]]


def test_padding(splits: list[int]) -> None:
    """Sequences of no context give zeros, split or not; those of no token leave no trace."""
    lengths = [(1, 0), (1, 300), (1, 0), (1, 7), (1, 0)]
    batch = make_batch(lengths, (2, 1, 64), 16)
    for planned in (True, False):  # the table is as wide as for 336 tokens
        assert_close("attention", batch.attend(planned), batch.expected())
    batch = make_batch([(1, 40), (1, 0), (1, 0)], (2, 1, 64), 16)
    assert_close("attention", batch.attend(planned=True), batch.expected())
    batch = make_batch([(0, 0), (1, 40), (0, 0), (3, 3), (0, 0)], (2, 1, 64), 16)
    assert_close("attention", batch.attend(planned=True), batch.expected())
    assert splits == [2, 2, 1, 1]


def test_launched_alike_whatever_the_contexts(splits: list[int]) -> None:
    """A graph of a batch that is captured without a plan serves any that has as many sequences: nothing but
    the shapes decides what is launched."""
    batch = make_batch([(1, 900), (1, 900)], (2, 1, 64), 16)
    batch.attend()
    other = make_batch([(1, 5), (1, 777)], (2, 1, 64), 16)
    wide = torch.zeros_like(batch.block_tables)
    wide[:, : other.block_tables.shape[1]] = other.block_tables
    other.block_tables = wide
    assert_close("attention", other.attend(), other.expected())
    assert splits == [4, 4]


def test_chunks_of_a_prompt_are_as_the_whole() -> None:
    whole = make_batch([(200, 200)], (3, 1, 64), 16)
    expected = whole.expected()
    assert_close("whole", whole.attend(planned=True), expected)
    for begin, end in ((0, 63), (63, 64), (64, 107), (107, 200)):
        assert_close(f"from {begin}", _chunk(whole, begin, end), expected[begin:end])


def _chunk(whole: Batch, begin: int, end: int) -> torch.Tensor:
    """Attention of these tokens, when the prefix before them is cached."""
    lens = torch.tensor([end], dtype=torch.int32)
    starts = torch.tensor([0, end - begin], dtype=torch.int32)
    part = Batch(
        q=whole.q[begin:end],
        keys=[],
        values=[],
        k_cache=whole.k_cache,
        v_cache=whole.v_cache,
        block_tables=whole.block_tables,
        context_lens=lens,
        query_start=starts,
        slot_mapping=whole.slot_mapping[begin:end],
    )
    return part.attend(planned=True)


def test_many_sequences() -> None:
    """More than are looked at at once to find the sequence of a tile."""
    batch = make_batch([(1 + (seq % 9 == 4), 3) for seq in range(150)], (1, 1, 16))
    assert_close("attention", batch.attend(planned=True), batch.expected())


def test_queries_of_any_strides() -> None:
    batch = make_batch([(1, 20), (3, 9)], (2, 1, 64))
    expected = batch.expected()
    batch.q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close("attention", batch.attend(), expected)


@pytest.mark.parametrize(
    ("heads", "block_size", "cache", "message"),
    [
        ((1, 1, 64), 4, torch.float32, "blocks of 8, 16, 32, 64, 128 tokens, not of 4"),
        ((1, 1, 264), 16, torch.float32, "heads of up to 256 numbers, not of 264"),
        ((1, 1, 66), 16, torch.int8, "multiple of 4, not of 66"),
    ],
    ids=str,
)
def test_what_is_refused(
    heads: tuple[int, int, int], block_size: int, cache: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch([(1, 5)], heads, block_size, cache=cache).attend()
