"""The claim `chunked` in short: how many tokens the steps have, on a tiny model; and the simulated half."""

from pathlib import Path

import pytest

from claim_chunked import GOAL, LEAST_THROUGHPUT, Load, Row, Seen, budgets, drive, simulated_row, targets
from claim_engine import running
from tiny import tiny_llama
from tiny_engine import tiny_engine

LOAD = Load(num_short=3, short_prompt=8, short_output=40, long_prompt=500, long_output=4, arrivals=(5, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return folder


def seen(folder: Path, **arguments: object) -> Seen:
    with running([tiny_engine(folder, max_model_len=1024, **arguments)]) as (run,):
        return drive(run, LOAD)


@pytest.fixture(scope="module")
def off(folder: Path) -> Seen:
    return seen(folder, enable_chunked_prefill=False, max_num_batched_tokens=1024)


def test_without_chunks_a_long_prompt_is_one_step(off: Seen) -> None:
    assert off.step_tokens[0] == 3 * 8
    assert sorted(off.step_tokens[1:])[-2:] == [503, 503]
    assert len(off.step_tokens) == 40  # nobody takes a step more for it
    assert sum(off.step_tokens) == 3 * (8 + 39) + 2 * (500 + 3)


def test_with_chunks_no_step_has_more_than_its_budget_and_all_answers_are_the_same(
    off: Seen, folder: Path
) -> None:
    chunked = seen(folder, max_num_batched_tokens=64)
    assert max(chunked.step_tokens) == 64
    assert chunked.step_tokens.count(64) == 2 * (500 // 61)  # beside a token for each of the three
    assert sum(chunked.step_tokens) == sum(off.step_tokens)
    assert chunked.answers == off.answers
    assert len(chunked.gaps_s) == 3 * 39


def test_simulated_the_inter_token_time_falls_and_throughput_holds() -> None:
    arguments = {**budgets(1024, 512), **targets(15)}
    off, *chunked = [simulated_row(label, chosen) for label, chosen in arguments.items()]
    assert [row.label for row in chunked] == [
        "1,024 tokens a step",
        "512 tokens a step",
        "`target_itl_ms` 15",
    ]
    for row in chunked:
        assert row.lower(off) >= GOAL
        assert row.throughput(off) >= LEAST_THROUGHPUT


def test_a_row_is_compared_with_the_one_without_chunks() -> None:
    off, on = Row("off", 0.01, 0.4, 8.0), Row("on", 0.01, 0.04, 10.0)
    assert off.cells(off) == ("off", "10.0", "400.0", "", "")
    assert on.cells(off) == ("on", "10.0", "40.0", "10.0", "0.80")
    assert not on.meets(off)  # it costs too much throughput
    assert Row("on", 0.01, 0.1, 8.4).meets(off)
