"""The judge of the soak: that it sees what it is there to see."""

import dataclasses
from typing import Any

import pytest

from soak_verdict import End, Outcome, Rest, Tally, judge

REST = Rest({"server": 100 << 20, "llm": 300 << 20}, {"server": 40, "llm": 20}, 0, 2, {"running": 0.0})
CLEAN = End(0, 0, True, 0, ())


def tally_of(*outcomes: Outcome) -> Tally:
    tally = Tally()
    for outcome in outcomes:
        tally.add(outcome)
    return tally


def verdict(*outcomes: Outcome, end: End = CLEAN, **rest: Any) -> list[str]:
    return judge(tally_of(*outcomes), REST, dataclasses.replace(REST, **rest), end)


def test_answers_errors_that_were_asked_for_and_clients_that_left_are_fine() -> None:
    outcomes = (
        Outcome("http", 1, "OK", differs=False),
        Outcome("bad", 1, "INVALID_ARG", allowed=frozenset({"INVALID_ARG"})),
        Outcome("cancel", 0, "OK", left=True),
        Outcome("cancel", 1, "OK", left=True),
    )
    assert verdict(*outcomes) == []
    tally = tally_of(*outcomes)
    assert (tally.requests, tally.finals, tally.left) == (4, 3, 1)
    assert tally.codes == {"OK": 2, "INVALID_ARG": 1}
    assert tally.kinds == {"http": 1, "bad": 1, "cancel": 2}


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("http", 0, "silence", "none in 60 s"), "http: 0 final responses (silence none in 60 s)"),
        (Outcome("http", 2, "OK"), "http: 2 final responses (OK )"),
        (Outcome("cancel", 2, "OK", left=True), "cancel: 2 final responses (OK )"),
        (Outcome("http", 1, "INTERNAL", "[INTERNAL] oh"), "http: INTERNAL, expected OK: [INTERNAL] oh"),
    ],
)
def test_a_request_without_exactly_one_right_end_is_named(outcome: Outcome, words: str) -> None:
    assert verdict(Outcome("http", 1, "OK"), outcome) == ["1 of 2 requests went wrong, such as:", words]


def test_one_answer_in_a_thousand_may_be_a_tie() -> None:
    right, wrong = (Outcome("http", 1, "OK", differs=differs) for differs in (False, True))
    assert verdict(*[right] * 999, wrong) == []
    assert verdict(*[right] * 998, wrong) == ["1 of 999 answers are not what they are alone"]


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (
            {"resident_bytes": {"server": 100 << 20, "llm": 324 << 20}},
            "resident memory has grown by 6.0%, from 400 to 424 MiB; allowed: 5%",
        ),
        ({"resident_bytes": {"server": 100 << 20}}, "the process llm is gone"),
        ({"threads": {"server": 40, "llm": 21}}, "llm has 21 threads; it had 20 after the warm-up"),
        ({"threads": {"server": 49, "llm": 20}}, "server has 49 threads; it had 40 after the warm-up"),
        ({"regions": 3}, "3 files in shared memory; there were 2 after the warm-up"),
        ({"zombies": 1}, "1 dead processes that nobody has waited for"),
        ({"gauges": {"running": 2.0}}, "running is 2 while nobody asks anything"),
    ],
)
def test_what_a_server_at_rest_holds_must_not_grow(rest: dict[str, Any], words: str) -> None:
    assert verdict(**rest) == [words]


def test_a_little_growth_is_fine() -> None:
    assert verdict(resident_bytes={"server": 109 << 20, "llm": 310 << 20}, threads={"server": 48}) == []


def test_what_a_stopped_server_leaves_is_named() -> None:
    assert verdict(end=End(-9, 3, False, 2, ("E: oh",))) == [
        "the server ended with status -9",
        "3 requests had no final response when the server was told to end",
        "processes are left of a server that was stopped",
        "2 files are left in shared memory",
        "1 errors in the server's log, such as:",
        "E: oh",
    ]


def test_what_is_no_requests_outcome_counts_too() -> None:
    tally = tally_of(Outcome("http", 1, "OK"))
    tally.blame("the model was not unloaded within 60 s")
    assert judge(tally, REST, REST, CLEAN) == [
        "1 of 1 requests went wrong, such as:",
        "the model was not unloaded within 60 s",
    ]
