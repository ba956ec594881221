"""How many blocks there are, which limit says so, and what is in them."""

import dataclasses
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.worker.kv_cache import CacheSize, KVCache, block_bytes, cache_size
from octavo_kernels import ops
from octavo_kernels.kv_format import dequantise
from tiny_config import MODEL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
BLOCK_BYTES = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_block_goes_out_as_bytes_and_another_one_gets_them(dtype: torch.dtype) -> None:
    cache = KVCache(MODEL, 5, 8, dtype, CPU)
    cache._data.view(torch.uint8).random_()
    before = cache._data.view(torch.uint8).clone()
    content = cache.content(1)
    assert content.nbytes == block_bytes(MODEL, 8, dtype)
    cache.set_content(3, content)
    after = cache._data.view(torch.uint8)
    assert torch.equal(after[:, :, 3], before[:, :, 1])
    assert torch.equal(after[:, :, [0, 1, 2, 4]], before[:, :, [0, 1, 2, 4]])
    cache._data.view(torch.uint8).zero_()
    assert content.any()  # a copy


def size_of(available: int = 8 * GIB, **options: Any) -> CacheSize:
    config = EngineConfig(model="m", **{"max_model_len": 1024, "block_size": 16, **options})
    return cache_size(config, BLOCK_BYTES, CPU, lambda: 0, available=lambda: available)


def test_a_block_holds_both_k_and_v_of_all_layers() -> None:
    cache = KVCache(MODEL, 5, 8, torch.bfloat16, CPU)
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.k.shape == layer.v.shape == (5, 2, 8, 16)
        assert layer.k.dtype == torch.bfloat16
    total = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.k, layer.v))
    assert total == 5 * block_bytes(MODEL, 8, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_block_has_its_scales_with_it(dtype: torch.dtype) -> None:
    cache = KVCache(MODEL, 5, 8, dtype, CPU)
    total = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.k, layer.v))
    assert total == 5 * block_bytes(MODEL, 8, dtype)
    # Two bytes for each token and head, where bfloat16 has two for each of 16 numbers.
    assert block_bytes(MODEL, 8, torch.bfloat16) * (16 + 2) == block_bytes(MODEL, 8, dtype) * 2 * 16
    for number, layer in enumerate(cache.layers):
        for new, tokens in ((number + 1, [0, 1, 2]), (number + 11, [32, 33, 34])):  # of blocks 0 and 4
            ops.kv_store(*torch.full((2, 3, 2, 16), float(new)), layer.k, layer.v, torch.tensor(tokens))
    cache.copy([0, 4], [3, 0])
    for number, layer in enumerate(cache.layers):
        for tensor in (layer.k, layer.v):
            tiles = tensor[[3, 0]].view(torch.uint8).flatten(0, 1).view(dtype)
            copied = dequantise(tiles, 16, torch.float32).view(2, 2, 8, 16)[:, :, :3]
            expected = torch.tensor([number + 1.0, number + 11.0])[:, None, None, None]
            torch.testing.assert_close(copied, expected.expand_as(copied), rtol=0.01, atol=0)


def test_copies_read_everything_before_they_write() -> None:
    cache = KVCache(MODEL, 5, 2, torch.float32, CPU)
    for number, layer in enumerate(cache.layers):
        layer.k.copy_(torch.arange(5.0)[:, None, None, None] + 10 * number)
        layer.v.copy_(torch.arange(5.0)[:, None, None, None] + 100 + 10 * number)
    cache.copy([0, 1, 4], [1, 2, 0])
    for number, layer in enumerate(cache.layers):
        expected = torch.tensor([4.0, 0.0, 1.0, 3.0, 4.0]) + 10 * number
        assert torch.equal(layer.k, expected[:, None, None, None].expand_as(layer.k))
        assert torch.equal(layer.v, expected[:, None, None, None].expand_as(layer.v) + 100)


def test_an_override_binds_before_all_else() -> None:
    size = size_of(num_gpu_blocks_override=70, kv_cache_memory_bytes=GIB)
    assert size == CacheSize(70, "num_gpu_blocks_override = 70")


def test_a_byte_budget() -> None:
    size = size_of(kv_cache_memory_bytes=GIB + 5)
    assert size == CacheSize(1024, "kv_cache_memory_bytes = 1.0 GiB")


def test_a_quarter_of_the_free_memory() -> None:
    assert size_of(available=2 * GIB) == CacheSize(512, "a quarter of the free memory = 512.0 MiB")


def test_at_most_four_gibibytes_on_a_cpu() -> None:
    assert size_of(available=100 * GIB) == CacheSize(4096, "the default of at most 4.0 GiB on a CPU")


def test_no_more_than_the_sequences_can_use() -> None:
    size = size_of(available=100 * GIB, max_num_seqs=3)
    assert size == CacheSize(3 * 64, "max_num_seqs x max_model_len = 3 x 1024 tokens")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"num_gpu_blocks_override": 63},
            "the KV cache would hold 1008 tokens (num_gpu_blocks_override = 63), less than one sequence of "
            "'max_model_len' (1024); raise num_gpu_blocks_override to 64, or lower max_model_len",
        ),
        (
            {"kv_cache_memory_bytes": 10 * BLOCK_BYTES},
            "the KV cache would hold 160 tokens (kv_cache_memory_bytes = 10.0 MiB), less than one "
            "sequence of 'max_model_len' (1024); set kv_cache_memory_bytes to 67108864 (64.0 MiB), or lower "
            "max_model_len",
        ),
        (
            {"available": 0},
            "the KV cache would hold 0 tokens (a quarter of the free memory = 0.0 MiB), less than one "
            "sequence of 'max_model_len' (1024); set kv_cache_memory_bytes to 67108864 (64.0 MiB), or lower "
            "max_model_len",
        ),
    ],
)
def test_too_small_for_one_sequence(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        size_of(**options)
    assert str(raised.value) == expected


@dataclasses.dataclass
class FakeCuda:
    """A GPU of 80 GiB with 16 GiB of weights, on which a step takes 4 GiB more, and others hold 3 GiB."""

    total: int = 80 * GIB
    others: int = 3 * GIB
    allocated: int = 16 * GIB
    reserved: int = 17 * GIB  # torch's pool, some of it unused
    peak: int = 30 * GIB  # while loading

    def run_step(self) -> int:
        self.peak = max(self.peak, self.allocated + 4 * GIB)
        self.reserved = self.allocated + 5 * GIB
        return 0

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.reserved - self.others, self.total


def test_a_gpu_is_profiled() -> None:
    cuda = FakeCuda()
    config = EngineConfig(model="m", max_model_len=131072, max_num_seqs=128, gpu_memory_utilization=0.75)
    size = cache_size(config, BLOCK_BYTES, CUDA, cuda.run_step, cuda=cuda)
    # 60 GiB may be used: less 16 of weights, 4 of the step
    assert size == CacheSize(40 * 1024, "gpu_memory_utilization = 0.75 (40.0 GiB)")


def test_what_graphs_keep_is_left_free_too() -> None:
    cuda = FakeCuda()
    config = EngineConfig(model="m", max_model_len=131072, max_num_seqs=128, gpu_memory_utilization=0.75)
    size = cache_size(config, BLOCK_BYTES, CUDA, lambda: cuda.run_step() + GIB, cuda=cuda)
    assert size == CacheSize(39 * 1024, "gpu_memory_utilization = 0.75 (39.0 GiB)")


def test_a_gpu_without_room() -> None:
    cuda = FakeCuda()
    config = EngineConfig(model="m", max_model_len=1024, gpu_memory_utilization=0.25)
    with pytest.raises(ConfigError, match=r"would hold 0 tokens .* raise gpu_memory_utilization, or lower"):
        cache_size(config, BLOCK_BYTES, CUDA, cuda.run_step, cuda=cuda)


def loaded(share: float, held: int, weights: int = 8 * GIB) -> CacheSize:
    """A model that may use a share of a GPU of 80 GiB, of which others hold so many bytes."""
    cuda = FakeCuda(others=held, allocated=weights, reserved=weights, peak=weights)
    config = EngineConfig(model="m", max_model_len=2**19, gpu_memory_utilization=share)
    return cache_size(config, BLOCK_BYTES // 16, CUDA, cuda.run_step, cuda=cuda)


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.6), (0.6, 0.3)])
def test_two_models_share_a_gpu_whichever_is_loaded_first(first: float, second: float) -> None:
    """Each gets what it would get alone, and together they fit."""
    context = GIB // 2
    one = loaded(first, context)
    used = context + int(first * 80 * GIB)
    other = loaded(second, used + context)
    assert one == loaded(first, 0)
    assert other == loaded(second, 0)
    assert used + context + int(second * 80 * GIB) <= 80 * GIB


def test_a_model_takes_no_more_than_others_leave() -> None:
    # 80 GiB, less 50 of others, 8 of weights, 4 of the step, and 1.6 that stay free
    size = loaded(0.9, 50 * GIB)
    assert size == CacheSize(
        int(16.4 * GIB) // (BLOCK_BYTES // 16), "what others leave of the GPU (16.4 GiB)"
    )
    with pytest.raises(
        ConfigError,
        match=r"would hold 0 tokens \(what others leave .* lower gpu_memory_utilization of the models that",
    ):
        loaded(0.9, 72 * GIB)


def test_models_on_one_cpu_fit_together_whichever_is_loaded_first() -> None:
    """Each takes a quarter of what is free then, so that any number leaves something."""
    free, taken = 8 * GIB, []
    for _ in range(6):
        taken.append(size_of(available=free).num_blocks * BLOCK_BYTES)
        free -= taken[-1]
    assert taken == sorted(taken, reverse=True)
    assert sum(taken) + free == 8 * GIB
    assert free > GIB
