"""The collector leaves out what was loaded and the objects of a step, still finds cycles, and comes back."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from octavo.serving.quiet_collector import QuietCollector


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[QuietCollector]:
    collector = QuietCollector()
    collector.start()
    yield collector
    collector.close()


def test_what_was_loaded_is_left_out_and_a_step_s_objects_set_nothing_off(collector: QuietCollector) -> None:
    assert gc.get_freeze_count() > 10_000
    runs: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.append(info["generation"])

    gc.callbacks.append(note)
    try:
        for _ in range(5):
            step = [(number,) for number in range(20_000)]
        del step
    finally:
        gc.callbacks.remove(note)
    assert runs == []


def test_cycles_that_pile_up_are_still_found(collector: QuietCollector) -> None:
    first = weakref.ref(Node())
    for _ in range(60_000):
        Node()
    assert first() is None


def test_closing_puts_everything_back() -> None:
    before = gc.get_threshold()
    collector = QuietCollector()
    collector.start()
    assert gc.get_threshold() != before
    collector.close()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
