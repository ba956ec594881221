"""Sampling parameters: what is taken, and what is said of what is not."""

from typing import Any

import pytest

from octavo.errors import InvalidArgument
from octavo.request import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams.parse({})
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (
        1,
        1.0,
        1.0,
        0,
        16,
    )
    assert (params.seed, params.logprobs, params.stop, params.ignore_eos) == (None, None, (), False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": "0"}, {"temperature": 0.0}),
        ({"top_k": -1.0, "n": "3"}, {"top_k": -1, "n": 3}),
        ({"ignore_eos": "false"}, {"ignore_eos": False}),
        ({"ignore_eos": "True"}, {"ignore_eos": True}),
        ({"ignore_eos": 1}, {"ignore_eos": True}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"], "stop_token_ids": [1, "2"]}, {"stop": ("x", "yz"), "stop_token_ids": (1, 2)}),
        ({"seed": None, "logprobs": 0}, {"seed": None, "logprobs": 0}),
        ({"logit_bias": {"5": "-1.5", 6: 2}}, {"logit_bias": {5: -1.5, 6: 2.0}}),
        ({"allowed_token_ids": ["3", 4]}, {"allowed_token_ids": (3, 4)}),
        ({"bad_words": "x", "best_of": "2"}, {"bad_words": ("x",), "best_of": 2}),
        ({"prompt_logprobs": 0, "presence_penalty": "-2"}, {"prompt_logprobs": 0, "presence_penalty": -2.0}),
        ({"repetition_penalty": 1, "frequency_penalty": 2}, {"repetition_penalty": 1.0}),
    ],
)
def test_values_are_taken_as_clients_send_them(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams.parse(given)
    for name, value in expected.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperatur": 1}, "unknown sampling parameter 'temperatur'; did you mean 'temperature'?"),
        ({"detokenize": False}, "sampling parameter 'detokenize' is not supported by this version"),
        ({"detokenize": []}, "sampling parameter 'detokenize' is not supported by this version"),
        ({"guided_json": {}}, "sampling parameter 'guided_json' is not supported by this version"),
        (
            {"truncate_prompt_tokens": 5},
            "parameter 'truncate_prompt_tokens' is not supported by this version",
        ),
        ({"zzz": 1}, "unknown sampling parameter 'zzz'; known: "),
        ({"n": 0}, "'n' is 0; allowed: 1 to 128"),
        ({"n": 1.5}, "'n' is 1.5; expected an integer"),
        ({"n": True}, "'n' is True; expected an integer"),
        ({"n": "9" * 5000}, "'n' is '999"),
        ({"temperature": -0.1}, "'temperature' is -0.1; allowed: 0 to 100"),
        ({"temperature": float("nan")}, "'temperature' is nan; allowed: 0 to 100"),
        ({"temperature": "1e999"}, "'temperature' is inf; allowed: 0 to 100"),
        ({"temperature": [1]}, "'temperature' is [1]; expected a number"),
        ({"top_p": 0}, "'top_p' is 0.0; allowed: above 0 and up to 1"),
        ({"top_k": -2}, "'top_k' is -2; allowed: -1 or 0 (off), or 1 and more"),
        ({"min_p": 1.1}, "'min_p' is 1.1; allowed: 0 to 1"),
        ({"seed": 2**64}, "'seed' is 18446744073709551616; allowed: an integer of 64 bits"),
        ({"stop": ""}, "'stop' is ('',); allowed: strings that are not empty"),
        ({"stop": ["x" * 4000, "y" * 97]}, "allowed: at most 64 strings of 4096 characters together"),
        ({"stop": ["x"] * 65}, "allowed: at most 64 strings of 4096 characters together"),
        ({"stop": [1]}, "'stop' is [1]; expected a string or a list of strings"),
        ({"stop_token_ids": "12"}, "'stop_token_ids' is '12'; expected a list of integers"),
        ({"stop_token_ids": [-1]}, "'stop_token_ids' is (-1,); allowed: token ids, 0 and more"),
        ({"stop": {"a": 1}}, "'stop' is {'a': 1}; expected a string or a list of strings"),
        ({"n": "2_0"}, "'n' is '2_0'; expected an integer"),
        ({"stop_token_ids": [5] * 257}, "allowed: at most 256"),
        ({"ignore_eos": "maybe"}, "'ignore_eos' is 'maybe'; expected true or false"),
        ({"max_tokens": 0}, "'max_tokens' is 0; allowed: 1 and more"),
        ({"min_tokens": 17}, "'min_tokens' is 17; allowed: 0 to max_tokens (16)"),
        ({"logprobs": 21}, "'logprobs' is 21; allowed: 0 to 20"),
        ({"prompt_logprobs": -1}, "'prompt_logprobs' is -1; allowed: 0 to 20"),
        ({"best_of": 1, "n": 2}, "'best_of' is 1; allowed: n (2) to 128"),
        ({"best_of": 129}, "'best_of' is 129; allowed: n (1) to 128"),
        ({"presence_penalty": 2.1}, "'presence_penalty' is 2.1; allowed: -2.0 to 2.0"),
        ({"frequency_penalty": float("nan")}, "'frequency_penalty' is nan; allowed: -2.0 to 2.0"),
        ({"repetition_penalty": 0}, "'repetition_penalty' is 0.0; allowed: 0.0001 to 10000"),
        (
            {"logit_bias": {"5": 101}},
            "'logit_bias' of token 5 is 101.0; allowed: token ids, 0 and more, each",
        ),
        ({"logit_bias": {"-5": 1}}, "'logit_bias' of token -5 is 1.0; allowed: token ids, 0 and more, each"),
        ({"logit_bias": {"x": 1}}, "expected an object of token ids, each once, with their biases"),
        ({"logit_bias": {"5": 1, "05": 2}}, "expected an object of token ids, each once, with their biases"),
        ({"logit_bias": [[5, 1]]}, "'logit_bias' is [[5, 1]]; expected an object of token ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "allowed: at most 1024 tokens"),
        ({"allowed_token_ids": []}, "'allowed_token_ids' is (); allowed: at least one token id, 0 and more"),
        ({"allowed_token_ids": [-1]}, "'allowed_token_ids' is (-1,); allowed: at least one token id"),
        ({"bad_words": ["a", ""]}, "'bad_words' is ('a', ''); allowed: strings that are not empty"),
        ({"bad_words": ["a"] * 1025}, "allowed: at most 1024 strings of 65536 characters together"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams.parse(given)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 450  # naming all parameters takes 385
    assert caught.value.wire.startswith("[INVALID_ARG] ")


@pytest.mark.parametrize(
    "given",
    [
        {"best_of": None, "n": 3},
        {"best_of": 3, "n": 3},
        {"use_beam_search": False, "beam_width": 1, "length_penalty": 1, "early_stopping": "false"},
        {"detokenize": True, "spaces_between_special_tokens": "true"},
        {"truncate_prompt_tokens": None, "guided_json": None, "structured_outputs": None},
        {"lora_name": None},
        {"lora_name": ""},
    ],
)
def test_what_asks_for_nothing_new_is_taken(given: dict[str, Any]) -> None:
    params = SamplingParams.parse(given)
    assert params.num_sequences == params.n == given.get("n", 1)


def test_python_callers_are_read_as_strictly_as_the_wire() -> None:
    params = SamplingParams(stop="abc", stop_token_ids=[1, 2], n="2")  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.n) == (("abc",), (1, 2), 2)
    assert SamplingParams(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"'max_tokens' is 2.5; expected an integer"):
        SamplingParams(max_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"'temperature' is None; expected a number"):
        SamplingParams(temperature=None)  # type: ignore[arg-type]
