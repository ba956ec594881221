"""The claim `sharing` in short, over an executor that checks every KV slot: blocks and copies."""

import pytest

from claim_sharing import Bench, Held, beams, differing, sampling
from octavo import SamplingParams
from octavo.config import EngineConfig
from simulated import SimulatedExecutor, expected_beams, expected_tokens

SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 4, 128, 256


@pytest.fixture
def bench() -> Bench:
    config = EngineConfig(
        model="none", block_size=SIZE, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, seed=0
    ).for_model(MAX_MODEL_LEN)
    return Bench(SimulatedExecutor(NUM_BLOCKS, SIZE), NUM_BLOCKS, config)


def prompt_of(length: int) -> list[int]:
    return [7 * token % 50 for token in range(length)]


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
@pytest.mark.parametrize("num_tokens", [1, 2, 21])
def test_samples_copy_what_the_last_block_holds_and_nothing_else(
    n: int, length: int, num_tokens: int, bench: Bench
) -> None:
    prompt = prompt_of(length)
    held = bench.run((prompt, sampling(num_tokens, n, seed=5)))
    copies = n - 1 if length % SIZE and num_tokens > 1 else 0
    assert held.copies == held.needed == copies
    assert held.answers == [
        expected_tokens(prompt, sampling(num_tokens), seed, MAX_MODEL_LEN) for seed in held.seeds
    ]
    assert differing(bench, prompt, num_tokens, held) == 0
    blocks, shared = -(-(length + num_tokens - 1) // SIZE), length // SIZE
    assert max(held.own) == n * blocks
    assert max(held.used) == (shared + n * (blocks - shared) if num_tokens > 1 else blocks)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_beams_copy_for_every_beam_beyond_those_they_come_from(width: int, length: int, bench: Bench) -> None:
    prompt, params = prompt_of(length), beams(21, width)
    held = bench.run((prompt, params))
    assert held.copies == held.needed > 0
    assert [tokens for tokens in held.answers if tokens] == expected_beams(prompt, params, MAX_MODEL_LEN)
    assert max(held.used) < max(held.own)
    assert held.mean_saved > 0.2


def test_beams_that_fork_between_two_blocks_copy_nothing(bench: Bench) -> None:
    # The first token of the answer fills the prompt's last block, so all beams begin in the next one.
    held = bench.run((prompt_of(16), beams(2, 4)))
    assert held.copies == held.needed == 0


def test_savings_are_of_the_most_and_of_the_mean() -> None:
    held = Held(block_size=4, used=[2, 6], own=[2, 10])
    assert held.saved == pytest.approx(0.4)
    assert held.mean_saved == pytest.approx(4 / 12)


def test_a_single_sequence_shares_nothing(bench: Bench) -> None:
    held = bench.run((prompt_of(9), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    assert held.used == held.own
    assert held.copies == held.needed == 0
