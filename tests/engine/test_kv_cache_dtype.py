"""`kv_cache_dtype`: what quantised keys and values cost, and that answers depend on nothing else."""

from pathlib import Path

import pytest
import torch

from octavo import Engine, SamplingParams
from perplexity import MODEL, load, read, windows
from tiny_engine import preempt_every, tiny_engine, whole

# Windows of text, perplexity against bfloat16, at most, and the share of places with the same most probable
# token, at least.
COSTS = {torch.int8: (12, 1.005, 0.96), torch.float8_e4m3fn: (48, 1.005, 0.94)}
SHARED = list(range(40, 80))
PROMPTS = [[9, 30, 31], [*SHARED, 100, 101], [*SHARED, 110], [3 + (i * i) % 250 for i in range(99)]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True, n=3)


@pytest.mark.timeout(1200)  # a minute where bfloat16 is multiplied in hardware, several where it is not
def test_perplexity_and_agreement_with_a_cache_of_bfloat16() -> None:
    model, config = load()
    texts = windows(48)
    plain = read(model, config, texts)
    for dtype, (count, cost, agreement) in COSTS.items():
        quantised, exact = read(model, config, texts[:count], dtype), plain.first(count)
        times, same = quantised.perplexity / exact.perplexity, quantised.agreement(exact)
        assert 1 / cost <= times <= cost, f"{dtype}: {times:.4f} times the perplexity"
        assert agreement <= same < 1, f"{dtype}: {same:.3f} of the most probable tokens are the same"


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_nearly_twice_the_blocks_of_bfloat16_in_the_same_memory(dtype: str) -> None:
    blocks = []
    for kv_cache_dtype in ("auto", dtype):
        engine = Engine(
            {
                "model": MODEL,
                "kv_cache_dtype": kv_cache_dtype,
                "dtype": "bfloat16",
                "max_model_len": 1024,
                "kv_cache_memory_bytes": 64 * 2**20,
            }
        )
        with whole(engine):
            greedy = SamplingParams(temperature=0, max_tokens=8)
            (completion,) = engine.generate(["The capital of France is"], greedy, progress=False)
            assert "Paris" in completion.outputs[0].text
            blocks.append(engine.stats().num_blocks)
    per_token = 2 * 30 * 3 * 64 * 2  # K and V of 30 layers and 3 heads, in bfloat16
    assert blocks == [64 * 2**20 // (16 * per_token), 64 * 2**20 // (16 * per_token * 66 // 128)]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp8_e4m3"])
def test_tokens_are_the_same_however_the_work_is_cut(folder: Path, dtype: str) -> None:
    """Blocks, chunks, forks, prefix hits and preemption. A number on the border between two codes might fall
    to the other side; that one output may differ is allowed for."""
    params = [GREEDY, GREEDY, FORKED, GREEDY]
    outputs = []
    for block_size, budget, steps in ((16, 8192, None), (1, 60, None), (8, 16, 10), (128, 60, 7)):
        arguments = {"block_size": block_size, "max_num_batched_tokens": budget}
        engine = tiny_engine(
            folder, kv_cache_dtype=dtype, num_gpu_blocks_override=8192 // block_size, **arguments
        )
        with whole(engine):
            if steps is not None:
                preempt_every(engine, steps)
            for _ in range(2):  # the second time every prefix is in the cache
                done = engine.generate(PROMPTS, params)
                outputs.append([output.token_ids for one in done for output in one.outputs])
            assert (engine.stats().preemptions_total > 0) == (steps is not None)
    different = sum(
        tokens != wanted for run in outputs for tokens, wanted in zip(run, outputs[0], strict=True)
    )
    assert different <= 1
