"""From tensors to a call: what is taken, what the defaults are, what is refused and in which words."""

import json
from typing import Any

import numpy as np
import pytest

from fakes import as_array
from octavo.errors import InvalidArgument
from octavo.request import SamplingParams
from octavo.serving import codec
from octavo.serving.codec import Cancel, Chat, Generate, Returns


def parse(parameters: Any = None, **inputs: Any) -> Generate | Cancel:
    tensors = {name: as_array(value) for name, value in inputs.items()}
    text = parameters if isinstance(parameters, str) else json.dumps(parameters) if parameters else ""
    codec.check_sizes(tensors, text)
    return codec.parse(tensors, text)


def generate(parameters: Any = None, **inputs: Any) -> Generate:
    call = parse(parameters, **{"text_input": "hi", **inputs})
    assert isinstance(call, Generate)
    return call


def sampling(**values: Any) -> str:
    return json.dumps(values)


def test_the_table_is_a_superset_of_vllms() -> None:
    assert [(s.name, s.data_type, s.length) for s in codec.INPUTS[:11]] == [
        ("text_input", "STRING", 1),
        ("image", "STRING", -1),
        ("stream", "BOOL", 1),
        ("sampling_parameters", "STRING", 1),
        ("exclude_input_in_output", "BOOL", 1),
        ("return_finish_reason", "BOOL", 1),
        ("return_cumulative_logprob", "BOOL", 1),
        ("return_logprobs", "BOOL", 1),
        ("return_num_input_tokens", "BOOL", 1),
        ("return_num_output_tokens", "BOOL", 1),
        ("embedding_request", "STRING", 1),
    ]
    assert [(s.name, s.data_type, s.length) for s in codec.OUTPUTS] == [
        ("text_output", "STRING", -1),
        ("finish_reason", "STRING", -1),
        ("cumulative_logprob", "FP32", -1),
        ("logprobs", "STRING", -1),
        ("num_input_tokens", "UINT32", 1),
        ("num_output_tokens", "UINT32", -1),
        ("token_ids", "INT32", -1),
        ("request_stats", "STRING", 1),
        ("prompt_logprobs", "STRING", 1),
    ]
    assert codec.INPUTS[0].config() == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}


def test_a_bare_prompt_gets_the_defaults() -> None:
    call = generate(text_input="höchst")
    assert call == Generate("höchst", SamplingParams(), stream=False, echo=True)
    assert call.params.max_tokens == 16
    assert call.returns == Returns()


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [
        (False, None, True),
        (False, False, True),
        (False, True, False),
        (True, None, False),
        (True, True, False),
    ],
)
def test_the_prompt_is_echoed_unless_streaming_or_excluded(
    stream: bool, exclude: bool | None, echo: bool
) -> None:
    inputs = {} if exclude is None else {"exclude_input_in_output": exclude}
    assert generate(stream=stream, **inputs).echo is echo


def test_prompts_come_as_text_as_ids_or_as_messages() -> None:
    ids = parse(input_ids=[1, 2, 3])
    assert isinstance(ids, Generate)
    assert ids.prompt == (1, 2, 3)
    assert all(type(token) is int for token in ids.prompt)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi", "name": "x"}]
    chat = parse(messages=json.dumps(messages))
    assert isinstance(chat, Generate)
    assert chat.prompt == Chat(tuple(messages))


def test_every_return_input_sets_its_own_flag() -> None:
    for name in Returns.__dataclass_fields__:
        assert generate(**{f"return_{name}": True}).returns == Returns(**{name: True})
        assert generate(**{f"return_{name}": False}).returns == Returns()


def test_sampling_parameters_are_read_and_strings_are_taken_for_numbers() -> None:
    text = sampling(temperature="0", n="2", ignore_eos="false", stop=["a", "b"], max_tokens=3, top_p=None)
    expected = SamplingParams(temperature=0, n=2, ignore_eos=False, stop=("a", "b"), max_tokens=3)
    assert generate(sampling_parameters=text).params == expected


def test_request_parameters_are_used_when_there_are_no_sampling_parameters() -> None:
    call = generate(
        {
            "temperature": 0.5,
            "max_tokens": "7",
            "octavo_priority": -3,
            "cache_salt": "salt",
            "tenant": "acme",
            "octavo_deadline_ms": 100,
            "id": "mine",
            "priority": 4,
            "timeout": 5,
            "sequence_id": 0,
            "triton_enable_empty_final_response": True,
        }
    )
    assert call.params == SamplingParams(temperature=0.5, max_tokens=7)
    assert (call.priority, call.cache_salt, call.tenant) == (-3, "salt", "acme")
    assert generate({"octavo_priority": "12"}).priority == 12


def test_sampling_parameters_win_over_request_parameters_of_the_same_kind() -> None:
    call = generate(
        {"temperature": 0.5, "max_tokens": "many", "best_of": 3, "octavo_priority": 1},
        sampling_parameters=sampling(n=2),
    )
    assert call.params == SamplingParams(n=2)
    assert call.priority == 1


def test_the_best_of_several_cannot_be_streamed() -> None:
    text = sampling(n=2, best_of=3)
    assert generate(sampling_parameters=text).params.num_sequences == 3
    with pytest.raises(InvalidArgument, match=r"'best_of' is 3 and 'n' 2: .* set 'stream' to false"):
        generate(sampling_parameters=text, stream=True)
    assert generate(sampling_parameters=sampling(n=3, best_of=3), stream=True).stream


def test_a_cancelling_request_names_another() -> None:
    assert parse(cancel_request_id="job-1") == Cancel("job-1")


def test_sizes_are_added_up() -> None:
    tensors = {"text_input": as_array("é" * 10), "stream": as_array(True), "input_ids": as_array([1, 2])}
    assert codec.check_sizes(tensors, "{}") == 20 + 1 + 8 + 2


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            {"text_input": "x" * (codec.MAX_PROMPT_BYTES + 1)},
            "'text_input' has 8388609 bytes; allowed: 8388608",
        ),
        (
            {"sampling_parameters": "x" * (2 << 20)},
            "'sampling_parameters' has 2097152 bytes; allowed: 1048576",
        ),
        ({"cancel_request_id": "x" * 5000}, "'cancel_request_id' has 5000 bytes; allowed: 4096"),
        ({"input_ids": np.zeros(3 << 20, np.int32)}, "'input_ids' has 12582912 bytes"),
        ({"input_text": "hi"}, "unknown input 'input_text'"),
    ],
)
def test_what_is_too_large_or_unknown_is_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(**inputs)


def test_request_parameters_have_a_limit_too() -> None:
    with pytest.raises(InvalidArgument, match="request parameters have 1100012 bytes"):
        generate(json.dumps({"stop": "x" * 1_100_000}))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "the request has no prompt; give exactly one of text_input, input_ids, messages"),
        ({"text_input": "a", "input_ids": [1]}, "has 'text_input' and 'input_ids'; give exactly one"),
        ({"text_input": b"ab\xff"}, "'text_input' is not UTF-8: invalid start byte at byte 2"),
        ({"text_input": "a", "image": "b64"}, "'image' is not supported by this version"),
        (
            {"text_input": "a", "embedding_request": "{}"},
            "the request has 'embedding_request' and 'text_input'; what to embed is the 'input' in",
        ),
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            "'exclude_input_in_output' is false",
        ),
        ({"messages": "[]"}, "'messages' must be a JSON list of at least one message"),
        ({"messages": "{}"}, "'messages' must be a JSON list"),
        ({"messages": '["hi"]'}, "'messages' holds a string at 0; expected an object"),
        ({"messages": '[{"role": "user"}]'}, "message 0 must have a 'content' that is a string"),
        ({"messages": '[{"role": 1, "content": ""}]'}, "message 0 must have a 'role'"),
        (
            {"messages": r'[{"role": "user", "content": "\ud800"}]'},
            "'messages' holds half of a surrogate pair",
        ),
        ({"cancel_request_id": ""}, "'cancel_request_id' is empty"),
        (
            {"cancel_request_id": "a", "text_input": "b", "stream": True},
            "this one has stream, text_input too",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(**inputs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "'sampling_parameters' is not valid JSON: Expecting property name"),
        ("", "'sampling_parameters' is not valid JSON"),
        ("[]", "'sampling_parameters' is JSON of a list; expected an object"),
        ("null", "JSON of null"),
        ("3", "JSON of a number"),
        ('{"temperature": NaN}', "'sampling_parameters' holds NaN, which is not JSON"),
        ('{"temperature": -Infinity}', "holds -Infinity"),
        ('{"temperature": 1e999}', "'temperature' is inf; allowed: 0 to 100"),
        ('{"n": 1, "n": 2}', "'sampling_parameters' has the key 'n' twice"),
        (f'{{"stop": {DEEP}}}', "JSON that is nested too deeply"),
        (f'{{"seed": {"9" * 5000}}}', "'sampling_parameters' is not valid JSON"),
        (r'{"stop": "\ud83d"}', "half of a surrogate pair"),
        ('{"temprature": 1}', "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ('{"guided_regex": "a"}', "'guided_regex' is not supported by this version"),
        ('{"n": 0}', "'n' is 0; allowed: 1 to 128"),
        ('{"max_tokens": "many"}', "'max_tokens' is 'many'; expected an integer"),
        ('{"ignore_eos": "perhaps"}', "'ignore_eos' is 'perhaps'; expected true or false"),
    ],
)
def test_bad_sampling_parameters_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        generate(sampling_parameters=text)
    assert words in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"octavo_priority": 2**31}, "'octavo_priority' is 2147483648; expected an integer of 32 bits"),
        ({"octavo_priority": "high"}, "'octavo_priority' is 'high'"),
        ({"octavo_priority": True}, "'octavo_priority' is True"),
        ({"octavo_prio": 1}, "unknown request parameter 'octavo_prio'; known: octavo_priority, cache_salt"),
        ({"cache_salt": ""}, "'cache_salt' must be a string of 1 to 4096"),
        ({"cache_salt": 3}, "'cache_salt' must be a string"),
        ({"tempature": 1}, "unknown sampling parameter 'tempature'; did you mean 'temperature'?"),
        ("[1]", "'request parameters' is JSON of a list"),
    ],
)
def test_bad_request_parameters_are_refused_by_name(parameters: Any, words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        generate(parameters)
    assert words in str(error.value)


def test_unknown_request_parameters_are_refused_beside_sampling_parameters_too() -> None:
    with pytest.raises(InvalidArgument, match="unknown sampling parameter 'tempature'"):
        generate({"tempature": 1}, sampling_parameters="{}")


def test_json_may_be_nested_up_to_a_depth() -> None:
    def nested(depth: int) -> str:
        return '{"stop": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    with pytest.raises(InvalidArgument, match=r"'stop' is \[\[\[.*; expected a string"):
        generate(sampling_parameters=nested(64))
    with pytest.raises(InvalidArgument, match="is JSON that is nested too deeply; allowed: 64 levels"):
        generate(sampling_parameters=nested(65))
    flat = sampling(stop=["[" * 60, "{" * 60])  # brackets in a text are no nesting
    assert len(generate(sampling_parameters=flat).params.stop) == 2


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert generate(sampling_parameters=r'{"stop": "\ud83d\ude00"}').params.stop == ("😀",)


def test_an_input_with_several_elements_is_refused_where_one_is_expected() -> None:
    with pytest.raises(InvalidArgument, match="'text_input' has 2 elements; expected 1"):
        codec.parse({"text_input": np.array([b"a", b"b"], np.object_)})
