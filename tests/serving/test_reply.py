"""From text deltas to tensors: n elements a response; deltas and totals where each is due."""

import json

import numpy as np
import pytest

from octavo.request import Logprob, RequestStats, SamplingParams, TextDelta
from octavo.serving.codec import Returns, Tensors
from octavo.serving.reply import Reply

EVERYTHING = Returns(*[True] * 6)


def delta(index: int, text: str, *tokens: int, done: str | None = None, last: bool = False) -> TextDelta:
    return TextDelta(
        "r",
        index,
        text,
        tokens,
        tuple((Logprob(token, -0.5, 1, chr(token)), Logprob(7, -2.0, 3, "\a")) for token in tokens),
        cumulative_logprob=-0.5 * len(tokens),
        finish_reason=done,  # type: ignore[arg-type]
        num_prompt_tokens=4,
        stats=RequestStats(0.5, 0.25, 1.5, 4, 2) if last else None,
        request_finished=last,
    )


def texts(tensors: Tensors | None, name: str = "text_output") -> list[str]:
    assert tensors is not None
    return [element.decode() for element in tensors[name]]


def test_streaming_gives_n_elements_each_time_empty_where_nothing_is_new() -> None:
    reply = Reply(SamplingParams(n=3), EVERYTHING, stream=True)
    reply.add(delta(1, "b", 98))
    first = reply.take()
    assert first is not None
    assert texts(first) == ["", "b", ""]
    assert texts(first, "finish_reason") == ["None", "None", "None"]
    assert first["num_output_tokens"].tolist() == [0, 1, 0]
    assert first["token_ids"].tolist() == [98]
    assert first["num_input_tokens"].tolist() == [4]
    reply.add(delta(1, "c", 99, done="stop"))
    reply.add(delta(0, "xy", 120, 121))
    second = reply.take()
    assert second is not None
    assert texts(second) == ["xy", "c", ""]
    assert texts(second, "finish_reason") == ["None", "stop", "None"]
    assert second["num_output_tokens"].tolist() == [2, 1, 0]
    assert second["token_ids"].tolist() == [120, 121, 99]
    reply.add(delta(0, "", done="length"))
    reply.add(delta(2, "z", 122, done="stop", last=True))
    third = reply.take()
    assert texts(third) == ["", "", "z"]
    assert texts(third, "finish_reason") == ["length", "stop", "stop"]


def test_nothing_new_makes_no_response() -> None:
    reply = Reply(SamplingParams(), Returns(), stream=True)
    assert reply.take() is None
    reply.add(delta(0, "a", 97))
    assert texts(reply.take()) == ["a"]
    assert reply.take() is None


def test_without_streaming_there_is_one_response_with_everything() -> None:
    reply = Reply(SamplingParams(n=2), Returns(num_output_tokens=True), stream=False, echo="prompt ")
    reply.add(delta(0, "a", 97))
    assert reply.take() is None
    reply.add(delta(1, "x", 120, done="stop"))
    assert reply.take() is None
    reply.add(delta(0, "b", 98, done="stop", last=True))
    tensors = reply.take()
    assert tensors is not None
    assert texts(tensors) == ["prompt ab", "prompt x"]
    assert tensors["num_output_tokens"].tolist() == [2, 1]
    assert reply.take() is None


def test_only_the_outputs_asked_for_are_there_with_the_types_of_the_table() -> None:
    for name in Returns.__dataclass_fields__:
        reply = Reply(SamplingParams(), Returns(**{name: True}), stream=True)
        reply.add(delta(0, "a", 97, done="stop", last=True))
        tensors = reply.take()
        assert tensors is not None
        assert set(tensors) == {"text_output", name}
    reply = Reply(SamplingParams(), EVERYTHING, stream=True)
    reply.add(delta(0, "ä", 97))
    tensors = reply.take()
    assert tensors is not None
    assert {name: array.dtype for name, array in tensors.items()} == {
        "text_output": np.object_,
        "finish_reason": np.object_,
        "cumulative_logprob": np.float32,
        "logprobs": np.object_,
        "num_input_tokens": np.uint32,
        "num_output_tokens": np.uint32,
        "token_ids": np.int32,
    }
    assert tensors["text_output"][0] == "ä".encode()


def test_cumulative_logprob_is_a_running_total_and_logprobs_are_a_delta() -> None:
    reply = Reply(SamplingParams(logprobs=1), Returns(cumulative_logprob=True, logprobs=True), stream=True)
    reply.add(TextDelta("r", text="a", logprobs=((Logprob(5, -0.25, 1, "a"),),), cumulative_logprob=-0.25))
    first = reply.take()
    reply.add(
        TextDelta(
            "r",
            text="bc",
            logprobs=((Logprob(6, -1.5, 2, "b"), Logprob(9, -0.5, 1, '"')), (Logprob(7, -0.5, 1, "c"),)),
            cumulative_logprob=-2.25,
        )
    )
    second = reply.take()
    assert first is not None
    assert second is not None
    assert first["cumulative_logprob"].tolist() == [-0.25]
    assert second["cumulative_logprob"].tolist() == [-2.25]
    assert json.loads(texts(first, "logprobs")[0]) == [
        {"5": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}}
    ]
    assert json.loads(texts(second, "logprobs")[0]) == [
        {
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": '"'},
        },
        {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}},
    ]


def test_logprobs_are_null_unless_the_sampling_parameter_is_set_and_a_list_when_nothing_is_new() -> None:
    unset = Reply(SamplingParams(n=2), Returns(logprobs=True), stream=True)
    unset.add(delta(0, "a", 97))
    assert texts(unset.take(), "logprobs") == ["null", "null"]
    zero = Reply(SamplingParams(n=2, logprobs=0), Returns(logprobs=True), stream=True)
    zero.add(delta(1, "", 97))
    assert [json.loads(text) for text in texts(zero.take(), "logprobs")] == [
        [],
        [
            {
                "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
                "7": {"logprob": -2.0, "rank": 3, "decoded_token": "\a"},
            }
        ],
    ]


def test_prompt_logprobs_come_with_the_last_response() -> None:
    reply = Reply(SamplingParams(prompt_logprobs=1), Returns(prompt_logprobs=True), stream=True)
    entries = (None, (Logprob(5, -0.25, 2, "a"), Logprob(6, -0.125, 1, "b")))
    reply.add(TextDelta("r", text="a", prompt_logprobs=entries))
    first = reply.take()
    assert first is not None
    assert first.keys() == {"text_output"}
    reply.add(TextDelta("r", finish_reason="stop", request_finished=True))
    assert json.loads(texts(reply.take(), "prompt_logprobs")[0]) == [
        None,
        {
            "5": {"logprob": -0.25, "rank": 2, "decoded_token": "a"},
            "6": {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
        },
    ]
    unset = Reply(SamplingParams(), Returns(prompt_logprobs=True), stream=False)
    unset.add(delta(0, "a", 97, done="stop", last=True))
    assert texts(unset.take(), "prompt_logprobs") == ["null"]


def test_a_token_that_was_ruled_out_is_still_json() -> None:
    reply = Reply(SamplingParams(logprobs=1), Returns(logprobs=True), stream=True)
    reply.add(TextDelta("r", logprobs=((Logprob(5, -float("inf"), 9, "a"),),), token_ids=(5,)))
    assert json.loads(texts(reply.take(), "logprobs")[0])[0]["5"]["logprob"] == -9999.0


@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_continuation_is_a_response(stream: bool) -> None:
    reply = Reply(SamplingParams(), Returns(finish_reason=True), stream)
    reply.add(TextDelta("r", finish_reason="stop", token_ids=(1,), request_finished=True))
    tensors = reply.take()
    assert texts(tensors) == [""]
    assert texts(tensors, "finish_reason") == ["stop"]
