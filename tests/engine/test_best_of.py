"""The sink that answers the best of a request's sequences."""

from octavo.engine.best_of import BestOf
from octavo.errors import Cancelled
from octavo.request import FinishReason, Logprob, RequestStats, TextDelta

STATS = RequestStats(queue_s=1, prefill_s=2, decode_s=3, cached_prompt_tokens=4, preemptions=5)


def delta(index: int, text: str, total: float, done: FinishReason | None = None, **rest: object) -> TextDelta:
    tokens = tuple(map(ord, text))
    entries = tuple((Logprob(token, -0.5, 1, chr(token)),) for token in tokens)
    return TextDelta("r", index, text, tokens, entries, total, done, num_prompt_tokens=3, **rest)  # type: ignore[arg-type]


def test_the_best_come_whole_in_order_once_all_are_done() -> None:
    out: list[TextDelta] = []
    sink = BestOf(2, out.append)
    prompt = (None, (Logprob(1, -1.0, 1, "x"),))
    sink(delta(1, "a", -1.0))
    sink(delta(0, "pq", -6.0, prompt_logprobs=prompt))
    sink(delta(1, "bc", -3.0, "stop"))
    sink(delta(2, "xyz", -2.5, "length"))
    assert out == []
    sink(delta(0, "r", -7.0, "length", request_finished=True, stats=STATS))
    first, second = out
    assert (first.index, first.text, first.cumulative_logprob, first.finish_reason) == (
        0,
        "xyz",
        -2.5,
        "length",
    )
    assert (second.index, second.text, second.cumulative_logprob, second.finish_reason) == (
        1,
        "abc",
        -3.0,
        "stop",
    )
    assert second.token_ids == (97, 98, 99)
    assert [entry[0].token_id for entry in second.logprobs] == [97, 98, 99]
    assert [d.request_finished for d in out] == [False, True]
    assert [d.prompt_logprobs for d in out] == [prompt, None]
    assert [d.stats for d in out] == [None, STATS]


def test_of_equals_the_first_is_best() -> None:
    out: list[TextDelta] = []
    sink = BestOf(1, out.append)
    sink(delta(1, "b", -1.0, "stop"))
    sink(delta(0, "a", -1.0, "stop", request_finished=True))
    assert [(d.index, d.text, d.request_finished) for d in out] == [(0, "a", True)]


def test_an_error_is_passed_on_at_once() -> None:
    out: list[TextDelta] = []
    sink = BestOf(1, out.append)
    sink(delta(0, "a", -1.0, "stop"))
    failure = TextDelta("r", error=Cancelled("gone"), request_finished=True)
    sink(failure)
    assert out == [failure]
