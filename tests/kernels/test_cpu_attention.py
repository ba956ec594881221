"""Native paged attention where it divides its work: long prompts, long contexts, few sequences, threads."""

from collections.abc import Iterator

import pytest
import torch

from numerics import assert_close
from octavo_kernels import ops
from octavo_kernels.cpu import library
from octavo_kernels.reference.paged_attention import paged_attention as reference_attention

pytestmark = pytest.mark.usefixtures("native")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library.set_num_threads(request.param)
    yield request.param
    library.set_num_threads(None)


def compare(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """`lengths`: (new tokens, context) of each sequence; `heads`: Hq, Hkv, D. Unused slots are NaN."""
    num_heads, num_kv_heads, head_size = heads
    counts = [-(-context // block_size) for _, context in lengths]
    free = torch.randperm(sum(counts) + 3).tolist()
    shape = (len(free), num_kv_heads, block_size, head_size)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    for seq, (_, context) in enumerate(lengths):
        blocks = [free.pop() for _ in range(counts[seq])]
        tables[seq, : counts[seq]] = torch.tensor(blocks)
        positions = torch.arange(context)
        for cache in caches:
            new = torch.randn(context, num_kv_heads, head_size).to(dtype)
            cache[torch.tensor(blocks)[positions // block_size], :, positions % block_size] = new
    starts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths]).int()
    q = torch.randn(int(starts[-1]), num_heads + 1, head_size).to(dtype)[:, :num_heads]
    actual = ops.paged_attention(q, *caches, tables, contexts, starts, 0.2, window, soft_cap)
    layout = ops.KVLayout(num_kv_heads, block_size, window, q.device)
    integers = (a.numpy() for a in (tables, contexts, starts, torch.zeros(0, dtype=torch.int64)))
    # In float32, so that what bfloat16 scores would lose is not taken for the native kernel's error.
    wide = (x.float() for x in (q, *caches))
    expected = reference_attention(*wide, ops.plan_batch(layout, *integers), 0.2, soft_cap)
    assert_close("attention", actual, expected, 3e-6 if dtype == torch.float32 else 8e-3)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
@pytest.mark.parametrize("heads", [(3, 1, 64), (6, 3, 80), (7, 7, 128), (32, 2, 16), (4, 2, 256)], ids=str)
def test_prompts_and_decodes_together(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, threads: int
) -> None:
    compare([(130, 130), (33, 290), (1, 700), (7, 7), (1, 1), (1, 64), (65, 129)], heads, block_size, dtype)


@DTYPES
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("window", [None, 100, 1500])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_one_long_sequence_is_divided_by_its_keys(
    new: int, window: int | None, soft_cap: float | None, dtype: torch.dtype, threads: int
) -> None:
    compare([(new, 2100)], (2, 1, 64), 16, dtype, window, soft_cap)


@DTYPES
@pytest.mark.parametrize("window", [1, 31, 64, 129])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_windows(window: int, soft_cap: float | None, dtype: torch.dtype, threads: int) -> None:
    compare([(150, 150), (1, 400), (40, 333), (1, 5)], (6, 3, 64), 8, dtype, window, soft_cap)


def test_a_group_of_too_many_heads_is_left_to_the_reference() -> None:
    compare([(3, 9), (1, 4)], (130, 2, 16), 4, torch.float32)


def test_scores_far_apart(native: str) -> None:
    """The running softmax is scaled by e to the -200 and back up from it without a NaN."""
    k = torch.zeros(1, 1, 256, 16)
    k[0, 0, :, 0] = torch.cat((torch.full((64,), -200.0), torch.full((64,), 200.0), torch.full((128,), -1e4)))
    v = torch.arange(256.0)[None, None, :, None].expand(1, 1, 256, 16).contiguous()
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    ends = (torch.tensor(values, dtype=torch.int32) for values in ([[0]], [256], [0, 1]))
    attended = ops.paged_attention(q, k, v, *ends, scale=1.0)
    assert_close("attention", attended, torch.full((1, 1, 16), (64 + 127) / 2))
