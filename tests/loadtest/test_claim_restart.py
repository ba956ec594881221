"""The claim `restart` in short, on a tiny model: what is computed and what is read, to the token."""

from functools import partial

import pytest

from claim_restart import BLOCK_SIZE, PREFIX_TOKENS, QUESTION_TOKENS, Start, starts
from tiny import tiny_llama
from tiny_engine import tiny_engine

PREFIXES = 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Start]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder, max_position_embeddings=4096)
    return starts(partial(tiny_engine, folder), PREFIXES)


def test_the_first_one_computes_and_those_after_it_read(measured: list[Start]) -> None:
    assert PREFIX_TOKENS % BLOCK_SIZE == 0
    block_bytes = 2 * 3 * 2 * BLOCK_SIZE * 16 * 4  # K and V of 3 layers and 2 heads of 16 numbers
    cold, *warm = measured
    assert len(warm) == 2
    assert cold.computed == PREFIXES * (PREFIX_TOKENS + QUESTION_TOKENS)
    assert cold.loaded_bytes == 0
    for start in warm:
        assert start.computed == PREFIXES * QUESTION_TOKENS
        assert start.loaded_bytes == PREFIXES * PREFIX_TOKENS // BLOCK_SIZE * block_bytes


def test_every_prompt_has_its_time(measured: list[Start]) -> None:
    for start in measured:
        assert len(start.first_s) == PREFIXES
        assert start.median_ms == pytest.approx(1e3 * sum(start.first_s) / PREFIXES)
        assert min(start.first_s) > 0
