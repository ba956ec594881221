"""Prefix blocks in a directory: found again after a restart, and never the reason for another answer."""

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import Engine, SamplingParams
from octavo.engine.loop import EngineLoop
from octavo.errors import ConfigError, StepFailed
from octavo.request import PoolingParams, TextDelta
from octavo.worker import disk_pool
from tiny_engine import tiny_engine, whole
from waiting import wait_until

SIZE = 16
SOON_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=length)


SYSTEM = prompt_of(0, 10 * SIZE)
PROMPTS = [SYSTEM + prompt_of(seed, 7 + seed) for seed in range(1, 5)]


@contextmanager
def engine(folder: Path, directory: Path | None, **arguments: Any) -> Iterator[Engine]:
    if directory is not None:
        arguments |= {"prefix_cache_dir": str(directory / "cache"), "prefix_cache_disk_gib": 0.0625}
    with whole(tiny_engine(folder, block_size=SIZE, seed=0, **arguments)) as made:
        yield made


def answers(engine: Engine, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [done.outputs[0].token_ids for done in engine.generate(list(prompts), params, progress=False)]


def hits(engine: Engine) -> tuple[int, int]:
    """Prompt tokens that were not computed, and those that came from files."""
    stats = engine.stats()
    return stats.cached_prompt_tokens_total, stats.disk_hits_total


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with engine(folder, None) as cold:
        return answers(cold, *PROMPTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_after_a_restart_prompts_are_warm_and_answers_the_same(
    folder: Path, tmp_path: Path, dtype: str, kv_cache_dtype: str
) -> None:
    how = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    with engine(folder, tmp_path, **how) as first:
        before = answers(first, *PROMPTS)
        assert hits(first) == (3 * len(SYSTEM), 0)
    with engine(folder, tmp_path, **how) as second:
        assert answers(second, *PROMPTS) == before
        assert hits(second) == (4 * len(SYSTEM), len(SYSTEM))


def test_the_answers_are_those_without_a_directory(
    folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    for _ in range(2):
        with engine(folder, tmp_path) as either:
            assert answers(either, *PROMPTS) == expected


def test_a_chat_goes_on_after_a_restart_with_what_was_answered(folder: Path, tmp_path: Path) -> None:
    question = prompt_of(9, 5)
    with engine(folder, tmp_path) as first:
        (answer,) = answers(first, PROMPTS[0], params=SamplingParams(temperature=0, max_tokens=40))
    chat = PROMPTS[0] + answer + question
    with engine(folder, tmp_path) as second, engine(folder, None) as cold:
        assert answers(second, chat) == answers(cold, chat)
        assert hits(second)[1] == (len(chat) - len(question) - 1) // SIZE * SIZE


def test_blocks_that_a_second_prompt_uses_are_saved_while_the_engine_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_pool, "_CLOSE_S", 0.0)  # as if it were killed
    with engine(folder, tmp_path) as first:
        answers(first, PROMPTS[0])
        assert files_in(tmp_path) == []
        answers(first, PROMPTS[1])
        wait_until(lambda: len(files_in(tmp_path)) == len(SYSTEM) // SIZE, timeout_s=SOON_S)
    with engine(folder, tmp_path) as second:
        answers(second, PROMPTS[2])
        assert hits(second) == (len(SYSTEM), len(SYSTEM))


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_blocks_that_are_evicted_are_saved_and_come_back(
    folder: Path, tmp_path: Path, swap_space: float, expected: list[list[int]]
) -> None:
    small = {"num_gpu_blocks_override": 24, "max_model_len": 200, "swap_space": swap_space}
    with engine(folder, tmp_path, preemption_mode="swap", **small) as crowded:
        assert answers(crowded, PROMPTS[0]) == expected[:1]
        for seed in range(20, 26):
            answers(crowded, prompt_of(seed, 150))
        wait_until(lambda: len(files_in(tmp_path)) >= len(SYSTEM) // SIZE, timeout_s=SOON_S)
        assert answers(crowded, PROMPTS[1]) == expected[1:2]
        assert hits(crowded) == (len(SYSTEM), 0 if swap_space else len(SYSTEM))


def test_damaged_files_change_no_answer_and_cost_one_line(
    folder: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, *PROMPTS)
    damage = random.Random(0)
    for path in files_in(tmp_path):
        content = bytearray(path.read_bytes())
        content[damage.randrange(len(content))] ^= 1
        path.write_bytes(content[: damage.choice((None, 0, 17, -1))])
    caplog.clear()
    with engine(folder, tmp_path) as second:
        assert answers(second, *PROMPTS) == expected
        for prompt in PROMPTS:
            assert answers(second, [5, *prompt])
        assert hits(second)[1] == 0
        assert second.stats().disk_damaged_files_total >= 1
    (line,) = warnings(caplog)
    assert "is damaged, or is not what its name says" in line


def test_a_directory_may_go_at_any_moment(folder: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, *PROMPTS)
    with engine(folder, tmp_path) as second:
        requests = [second.make_request(str(number), prompt, GREEDY) for number, prompt in enumerate(PROMPTS)]
        for request in requests:
            assert second.expects_stored(request)
            second.read_stored(request)
        (tmp_path / "cache").rename(tmp_path / "gone")
        assert not second.expects_stored(second.make_request("later", PROMPTS[0], GREEDY))
        assert answers(second, *PROMPTS) == expected
        assert hits(second)[1] == len(SYSTEM)  # which the requests still hold


def test_two_engines_share_a_directory(folder: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(folder, tmp_path) as one, engine(folder, tmp_path) as other:
        for _ in range(2):  # the second time, its blocks are used again and saved
            assert answers(one, PROMPTS[0]) == expected[:1]
        wait_until(lambda: len(files_in(tmp_path)) == len(SYSTEM) // SIZE, timeout_s=SOON_S)
        assert answers(other, *PROMPTS) == expected
        assert hits(other) == (4 * len(SYSTEM), len(SYSTEM))
        together = [threading.Thread(target=answers, args=(each, *PROMPTS)) for each in (one, other)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        assert answers(one, *PROMPTS) == expected


def test_tenants_and_models_find_their_own_blocks_only(folder: Path, tmp_path: Path) -> None:
    def run(made: Engine, salt: str | None) -> int:
        request = made.make_request("r", PROMPTS[0], GREEDY, cache_salt=salt)
        made.read_stored(request)
        found = len(request.stored)
        made.add(request, lambda _: None)
        while made.has_work:
            made.step()
        return found

    with engine(folder, tmp_path) as first:
        assert run(first, "a") == 0
    with engine(folder, tmp_path) as second:
        assert [run(second, salt) for salt in ("b", None, "a")] == [0, 0, len(SYSTEM) // SIZE]
        assert hits(second) == (len(SYSTEM), len(SYSTEM))
    for other in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}):
        with engine(folder, tmp_path, **other) as third:
            assert run(third, "a") == 0


def test_who_needs_the_whole_prompt_computes_it(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, *PROMPTS)
    with engine(folder, tmp_path) as second:
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        mean = second.make_request("mean", PROMPTS[0], embed=PoolingParams("mean"))
        for request in (second.make_request("scored", PROMPTS[0], scored), mean):
            assert not second.expects_stored(request)
            second.read_stored(request)
            assert request.stored == {}
        (done,) = second.generate([PROMPTS[0]], scored, progress=False)
        assert done.prompt_logprobs is not None
        assert len(done.prompt_logprobs) == len(PROMPTS[0])
        assert hits(second) == (0, 0)


def test_what_was_read_is_let_go_when_it_is_used_or_given_up(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, *PROMPTS)
    with engine(folder, tmp_path) as second:
        directory = second._directory
        assert directory is not None
        requests = [second.make_request(str(number), PROMPTS[number], GREEDY) for number in range(3)]
        for request in requests:
            second.read_stored(request)
            second.add(request, lambda _: None)
        assert len(directory._loaded) == len(SYSTEM) // SIZE
        second.abort("2")
        while second.has_work:
            second.step()
        assert [request.stored for request in requests[:2]] == [{}, {}]
        del request, requests
        assert second.step() is False
        assert len(directory._loaded) == 0


def test_what_may_be_wrong_is_deleted(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, PROMPTS[0])
        answers(first, PROMPTS[1])
        wait_until(lambda: len(files_in(tmp_path)) == len(SYSTEM) // SIZE, timeout_s=SOON_S)
        first.add(first.make_request("r", PROMPTS[2], GREEDY), lambda _: None)
        first.step()
        first._blocks.distrust(first._scheduler._running[0])
        first.abort("r")
    with engine(folder, tmp_path) as second:
        answers(second, *PROMPTS)
        assert hits(second)[1] == 0


def test_a_nan_in_files_costs_one_request(folder: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(folder, tmp_path) as first:
        answers(first, *PROMPTS)
    with engine(folder, tmp_path) as second:
        directory = second._directory
        assert directory is not None
        files = directory._files
        for path in files_in(tmp_path):
            path.unlink()
            nans = np.full(files.block_bytes, 0xFF, np.uint8)
            assert files.write(bytes.fromhex(path.stem), nans, time.time_ns())
        with pytest.raises(StepFailed, match="NaN"):
            answers(second, PROMPTS[0])
        assert answers(second, *PROMPTS) == expected
    with engine(folder, tmp_path) as third:
        assert answers(third, *PROMPTS) == expected
        assert hits(third)[1] == len(SYSTEM)


def test_an_engine_that_has_failed_saves_nothing(folder: Path, tmp_path: Path) -> None:
    ended = threading.Event()

    def sink(delta: TextDelta) -> None:
        if delta.request_finished:
            ended.set()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    made = tiny_engine(folder, prefix_cache_dir=str(tmp_path / "cache"))
    answers(made, PROMPTS[0])
    loop = EngineLoop(made)
    loop.start()
    made._scheduler.schedule = fail  # type: ignore[assignment]
    loop.submit(made.make_request("r", PROMPTS[1], GREEDY), sink)
    assert ended.wait(SOON_S)
    loop.stop(0)
    made.close()
    assert files_in(tmp_path) == []


def test_a_limit_that_holds_next_to_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'prefix_cache_disk_gib' is 1e-05; this model's KV blocks have"):
        tiny_engine(folder, prefix_cache_dir=str(tmp_path), prefix_cache_disk_gib=1e-5)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_stops_nobody(
    folder: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    with engine(folder, tmp_path) as made:
        assert answers(made, *PROMPTS) == expected
        assert answers(made, *PROMPTS) == expected
    assert 1 <= len(warnings(caplog)) <= 3
    assert all("blocks are computed instead" in line for line in warnings(caplog))
