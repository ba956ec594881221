"""Malformed input: each kind gets its code and a text that names what is wrong, and nobody else notices.

All of it is sent to one server, over HTTP and over gRPC, beside good requests that never pause. What does
not fit the inputs that the model declares never reaches it: Triton refuses that in its own words.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import pytest

from octavo.serving.launcher import RunningServer
from raw_requests import (
    RawTensor,
    fits_grpc,
    fits_http,
    grpc_answers,
    grpc_message,
    http_body,
    string_element,
)
from triton_clients import GrpcStream, connect, encode, generate, post, wait_idle

GOOD = {
    "text_input": "Once upon a time",
    "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 40, "ignore_eos": True}),
    "exclude_input_in_output": True,
}
A = string_element("a")


@pytest.mark.parametrize(
    ("inputs", "status", "words"),
    [
        (
            {"text_input": "a", "messages": "[]"},
            "INVALID_ARGUMENT",
            "[INVALID_ARG] the request has 'text_input'",
        ),
        ({"cancel_request_id": "nobody"}, "NOT_FOUND", "[NOT_FOUND] no open request has the id"),
    ],
)
def test_grpc_carries_tritons_code_for_a_client_that_asks_for_it(
    llm: RunningServer, inputs: dict[str, str], status: str, words: str
) -> None:
    """Before all else here, since that must not be asked for beside other streams: see `GrpcStream`."""
    with GrpcStream(llm, status_codes=True) as stream:
        error = stream.send(**inputs).error()
    assert error.startswith(f"[StatusCode.{status}] {words}")


@pytest.fixture(scope="module")
def bystander(llm: RunningServer) -> Iterator[None]:
    """A good request is always under way, and each of them says what it says alone."""
    alone = generate(llm, **GOOD)["text_output"]
    texts: Counter[str] = Counter()
    done = Event()

    def go_on() -> None:
        with GrpcStream(llm) as stream:
            while not (texts and done.is_set()):
                texts[stream.send(**GOOD, stream=True).result()] += 1

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            yield
        finally:
            done.set()
        going.result()
    assert set(texts) == {alone}
    wait_idle(llm)


class Case(NamedTuple):
    """A request, and how the error's text begins after its code. `only` is the one transport that lets it."""

    request: dict[str, Any]
    words: str
    code: str = "INVALID_ARG"
    only: str = ""


def text(**values: Any) -> dict[str, Any]:
    return {"text_input": "a", **values}


def sampling(parameters: str | bytes | dict[str, Any]) -> dict[str, Any]:
    wrong = json.dumps(parameters) if isinstance(parameters, dict) else parameters
    return {"text_input": "a", "sampling_parameters": wrong}


def embedding(request: str | dict[str, Any]) -> dict[str, Any]:
    return {"embedding_request": json.dumps(request) if isinstance(request, dict) else request}


def search(**values: Any) -> dict[str, Any]:
    return sampling({"use_beam_search": True, "beam_width": 3, **values})


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": json.dumps(messages)}


CASES = [
    # The prompt.
    Case({}, "the request has no prompt; give exactly one of text_input, input_ids, messages"),
    Case(text(input_ids=[1]), "the request has 'text_input' and 'input_ids'; give exactly one of"),
    Case(text(messages="[]"), "the request has 'text_input' and 'messages'; give exactly one of"),
    Case({"input_ids": [1], "messages": "[]"}, "the request has 'input_ids' and 'messages'; give exactly"),
    Case({"text_input": ""}, "the prompt is empty: it has no tokens; give at least one"),
    Case(
        {"text_input": "word " * 600}, "the prompt has 601 tokens; max_model_len is 512, so at most 511 fit"
    ),
    Case({"text_input": "x" * (10 << 20)}, "'text_input' has 10485760 bytes; allowed: 8388608"),
    Case({"text_input": b"ab\xff"}, "'text_input' is not UTF-8: invalid start byte at byte 2"),
    Case({"text_input": b"\xed\xa0\x80"}, "'text_input' is not UTF-8: invalid continuation byte at byte 0"),
    Case({"text_input": b"\xc0\x80"}, "'text_input' is not UTF-8: invalid start byte at byte 0"),
    Case({"text_input": b"caf\xc3"}, "'text_input' is not UTF-8: unexpected end of data at byte 3"),
    Case({"input_ids": []}, "the prompt is empty: it has no tokens; give at least one"),
    Case({"input_ids": [1, 49152]}, "'input_ids' holds 49152; allowed: 0 to 49151"),
    Case({"input_ids": [-1]}, "'input_ids' holds -1; allowed: 0 to 49151"),
    Case({"input_ids": [2**31 - 1]}, "'input_ids' holds 2147483647; allowed: 0 to 49151"),
    Case({"input_ids": [7] * 512}, "the prompt has 512 tokens; max_model_len is 512, so at most 511 fit"),
    Case({"input_ids": [7] * ((2 << 20) + 1)}, "'input_ids' has 8388612 bytes; allowed: 8388608"),
    Case(text(image=["aGk="]), "'image' is not supported by this version, which does text generation only"),
    Case(
        text(stream=True, exclude_input_in_output=False),
        "'exclude_input_in_output' is false; when 'stream' is true it must be true or unset",
    ),
    # Messages.
    Case({"messages": ""}, "'messages' is not valid JSON: Expecting value"),
    Case({"messages": "hello"}, "'messages' is not valid JSON: Expecting value"),
    Case(
        {"messages": b'[{"role": "user", "content": "\xff"}]'}, "'messages' is not UTF-8: invalid start byte"
    ),
    Case({"messages": "[]"}, "'messages' must be a JSON list of at least one message"),
    Case({"messages": '{"role": "user", "content": "a"}'}, "'messages' has the unknown key 'role'; known: "),
    Case({"messages": '["a"]'}, "'messages' holds a string at 0; expected an object"),
    Case(chat({"role": "user"}), "message 0 must have a 'content' that is a string; it has none"),
    Case(
        chat({"role": "user", "content": "a"}, {"role": "user", "content": None}),
        "message 1 must have a 'content' that is a string; it is null",
    ),
    Case(chat({"role": "user", "content": [{"type": "image"}]}), "message 0 must have a 'content' that is a"),
    Case(chat({"role": 7, "content": "a"}), "message 0 must have a 'role' that is a string; it is a number"),
    Case(chat({"content": "a"}), "message 0 must have a 'role' that is a string; it has none"),
    Case(
        {"messages": r'[{"role": "user", "content": "\ud800"}]'}, "'messages' holds half of a surrogate pair"
    ),
    Case({"messages": '[{"role": "user", "role": "user"}]'}, "'messages' has the key 'role' twice"),
    Case({"messages": '[{"role": NaN}]'}, "'messages' holds NaN, which is not JSON"),
    Case({"messages": '[{"a":' * 99}, "'messages' is not valid JSON"),
    Case(
        {"messages": "[" * 65 + "]" * 65}, "'messages' is JSON that is nested too deeply; allowed: 64 levels"
    ),
    Case({"messages": "[" * 500_000}, "'messages' is JSON that is nested too deeply; allowed: 64 levels"),
    # Embeddings.
    Case(text(embedding_request='{"input": "a"}'), "the request has 'embedding_request' and 'text_input'"),
    Case(embedding("{"), "'embedding_request' is not valid JSON: Expecting property name"),
    Case(embedding("[1]"), "'embedding_request' is JSON of a list; expected an object"),
    Case(embedding("{}"), "'embedding_request' has no 'input': a text, or a list of token ids"),
    Case(embedding({"input": None}), "'input' is null; expected a text or a list of token ids"),
    Case(embedding({"input": {"a": 1}}), "'input' is an object; expected a text or a list of token ids"),
    Case(embedding({"input": ["a", "b"]}), "'input' holds 'a' at 0; expected token ids only"),
    Case(embedding({"input": [1, True]}), "'input' holds True at 1; expected token ids only"),
    Case(embedding({"input": [1.5]}), "'input' holds 1.5 at 0; expected token ids only"),
    Case(embedding({"input": [5, 49152]}), "'input' holds 49152; allowed: 0 to 49151"),
    Case(embedding({"input": [10**99]}), "'input' holds 1000"),
    Case(embedding({"input": ""}), "the prompt is empty: it has no tokens; give at least one"),
    Case(embedding({"input": []}), "the prompt is empty: it has no tokens; give at least one"),
    Case(embedding({"input": "word " * 600}), "the prompt has 601 tokens; max_model_len is 512"),
    Case(
        embedding({"inputs": "a"}), "'embedding_request' has the unknown key 'inputs'; did you mean 'input'?"
    ),
    Case(embedding('{"input": "a", "input": "b"}'), "'embedding_request' has the key 'input' twice"),
    Case(embedding({"input": "a", "pooling_params": []}), "'pooling_params' is a list; expected an object"),
    Case(
        embedding({"input": "a", "pooling_params": {"dimension": 1}}),
        "'pooling_params' has the unknown key 'dimension'; did you mean 'dimensions'?",
    ),
    Case(
        embedding({"input": "a", "pooling_params": {"pooling": "max"}}),
        "'pooling' is 'max'; allowed: last, mean",
    ),
    *(
        Case(embedding({"input": "a", "pooling_params": {"dimensions": value}}), words)
        for value, words in (
            (0, "'dimensions' is 0; allowed: 1 to 576"),
            (577, "'dimensions' is 577; allowed: 1 to 576"),
            ("8", "'dimensions' is '8'; expected an integer"),
            ([8, 9], "'dimensions' is [8, 9]; expected an integer"),
        )
    ),
    # Cancelling by id.
    Case({"cancel_request_id": ""}, "'cancel_request_id' is empty; give the id that the client set on the"),
    Case(
        text(cancel_request_id="b"), "'cancel_request_id' stands alone in its request; this one has text_inp"
    ),
    Case({"cancel_request_id": b"\xff"}, "'cancel_request_id' is not UTF-8: invalid start byte at byte 0"),
    Case({"cancel_request_id": "x" * 5000}, "'cancel_request_id' has 5000 bytes; allowed: 4096"),
    Case({"cancel_request_id": "nobody"}, "no open request has the id 'nobody'", "NOT_FOUND"),
    Case({"cancel_request_id": "\0"}, r"no open request has the id '\x00'", "NOT_FOUND"),
    # Request parameters.
    Case(text(temprature=1), "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
    Case(text(max_tokens="many"), "'max_tokens' is 'many'; expected an integer"),
    Case(
        text(temprature=1, sampling_parameters="{}"), "unknown sampling parameter 'temprature'; did you mean"
    ),
    Case(text(octavo_rank=1), "unknown request parameter 'octavo_rank'; known: octavo_priority, cache_salt"),
    Case(text(stop="x" * (1 << 20)), "the request parameters have 1048"),
    Case(text(octavo_priority="high"), "'octavo_priority' is 'high'; expected an integer of 32 bits, the"),
    Case(text(octavo_priority=2**31), "'octavo_priority' is 2147483648; expected an integer of 32 bits"),
    Case(text(octavo_priority=True), "'octavo_priority' is True; expected an integer of 32 bits"),
    Case(text(octavo_priority=1.5), "'octavo_priority' is 1.5; expected an integer of 32 bits"),
    Case(text(octavo_deadline_ms=-1), "'octavo_deadline_ms' is -1; expected milliseconds, 0 for no limit"),
    Case(text(octavo_deadline_ms="soon"), "'octavo_deadline_ms' is 'soon'; expected milliseconds, 0 for no"),
    Case(
        text(octavo_deadline_ms="9" * 20), "'octavo_deadline_ms' is '99999999999999999999'; expected millise"
    ),
    Case(text(octavo_deadline_ms=0.5), "'octavo_deadline_ms' is 0.5; expected milliseconds, 0 for no limit"),
    Case(text(timeout="soon"), "'timeout' is 'soon'; expected microseconds, 0 for no limit", only="http"),
    Case(text(timeout=-1), "'timeout' is -1; expected microseconds, 0 for no limit", only="http"),
    Case(text(tenant=""), "'tenant' must be a string of 1 to 4096 characters; it has 0"),
    Case(text(tenant=5), "'tenant' must be a string of 1 to 4096 characters; it is a number"),
    Case(text(cache_salt=""), "'cache_salt' must be a string of 1 to 4096 characters; it has 0"),
    Case(text(cache_salt=True), "'cache_salt' must be a string of 1 to 4096 characters; it is a boolean"),
    Case(text(cache_salt="s" * 4097), "'cache_salt' must be a string of 1 to 4096 characters; it has 4097"),
    # The JSON of the sampling parameters.
    *(
        Case(sampling(wrong), f"'sampling_parameters' {words}")
        for wrong, words in (
            ("", "is not valid JSON: Expecting value"),
            ("{", "is not valid JSON: Expecting property name"),
            ("{'n': 1}", "is not valid JSON: Expecting property name"),
            ('{"n": 1}}', "is not valid JSON: Extra data"),
            ('{"seed": ' + "9" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
            ("\ufeff{}", "is not valid JSON: Unexpected UTF-8 BOM"),
            ('{"stop": "\0"}', "is not valid JSON: Invalid control character"),
            (b'{"stop": "\xff"}', "is not UTF-8: invalid start byte at byte 10"),
            ("[1]", "is JSON of a list; expected an object"),
            ('"n"', "is JSON of a string; expected an object"),
            ("null", "is JSON of null; expected an object"),
            ("3", "is JSON of a number; expected an object"),
            ("true", "is JSON of a boolean; expected an object"),
            ('{"temperature": NaN}', "holds NaN, which is not JSON"),
            ('{"temperature": Infinity}', "holds Infinity, which is not JSON"),
            ('{"temperature": -Infinity}', "holds -Infinity, which is not JSON"),
            ('{"n": 1, "n": 2}', "has the key 'n' twice"),
            (r'{"stop": "\ud800"}', "holds half of a surrogate pair, which is no character"),
            (r'{"\udfff": 1}', "holds half of a surrogate pair, which is no character"),
            ("[" * 100_000, "is JSON that is nested too deeply; allowed: 64 levels"),
            (
                '{"stop": ' + "[" * 64 + "]" * 64 + "}",
                "is JSON that is nested too deeply; allowed: 64 levels",
            ),
            (" " * (2 << 20), "has 2097152 bytes; allowed: 1048576"),
        )
    ),
    # Their names.
    Case(sampling({"temprature": 1}), "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
    Case(sampling({"": 1}), "unknown sampling parameter ''; known: allowed_token_ids, bad_words, beam_width"),
    Case(sampling({"n\n": 1}), r"unknown sampling parameter 'n\n'; did you mean 'n'?"),
    Case(sampling({"x" * 9000: 1}), f"unknown sampling parameter '{'x' * 80}'; known: allowed_token_ids"),
    Case(
        sampling({"guided_regex": "a"}), "sampling parameter 'guided_regex' is not supported by this version"
    ),
    Case(sampling({"detokenize": False}), "sampling parameter 'detokenize' is not supported by this version"),
    Case(
        sampling({"lora_name": "x"}), "no adapter 'x' is here: this model is served without any", "NOT_FOUND"
    ),
    # Their values.
    *(
        Case(sampling({name: value}), f"'{name}' is {words}")
        for name, value, words in (
            ("n", 0, "0; allowed: 1 to 128"),
            ("n", 64, "64; this server runs at most 32 sequences"),
            ("n", 129, "129; allowed: 1 to 128"),
            ("n", 1.5, "1.5; expected an integer"),
            ("n", True, "True; expected an integer"),
            ("n", 10**300, "1000000"),
            ("n", [1], "[1]; expected an integer"),
            ("temperature", -1, "-1.0; allowed: 0 to 100"),
            ("temperature", 101, "101.0; allowed: 0 to 100"),
            ("temperature", "nan", "nan; allowed: 0 to 100"),
            ("temperature", "hot", "'hot'; expected a number"),
            ("temperature", {}, "{}; expected a number"),
            ("top_p", 0, "0.0; allowed: above 0 and up to 1"),
            ("top_p", 1.1, "1.1; allowed: above 0 and up to 1"),
            ("top_k", -2, "-2; allowed: -1 or 0 (off), or 1 and more"),
            ("top_k", 2**31, "2147483648; allowed: -1 or 0 (off), or 1 and more"),
            ("min_p", -0.1, "-0.1; allowed: 0 to 1"),
            ("min_p", "inf", "inf; allowed: 0 to 1"),
            ("seed", 2**64, "18446744073709551616; allowed: an integer of 64 bits"),
            ("seed", 0.5, "0.5; expected an integer"),
            ("max_tokens", 0, "0; allowed: 1 and more"),
            ("max_tokens", -(2**63), "-9223372036854775808; allowed: 1 and more"),
            ("max_tokens", 2**31, "2147483648; allowed: 1 and more"),
            ("min_tokens", 17, "17; allowed: 0 to max_tokens (16)"),
            ("min_tokens", -1, "-1; allowed: 0 to max_tokens (16)"),
            ("stop", "", "('',); allowed: strings that are not empty"),
            ("stop", ["b", ""], "('b', ''); allowed: strings that are not empty"),
            ("stop", 5, "5; expected a string or a list of strings"),
            ("stop", {"a": 1}, "{'a': 1}; expected a string or a list of strings"),
            ("stop", ["b"] * 65, "('b', 'b', "),
            ("stop", "b" * 4097, f"('{'b' * 78}; allowed: at most 64 strings of 4096 characters together"),
            ("stop_token_ids", "12", "'12'; expected a list of integers"),
            ("stop_token_ids", [-1], "(-1,); allowed: token ids, 0 and more"),
            ("stop_token_ids", [5] * 257, f"({'5, ' * 26}5; allowed: at most 256"),
            ("logprobs", -1, "-1; allowed: 0 to 20"),
            ("logprobs", 21, "21; allowed: 0 to 20"),
            ("prompt_logprobs", 21, "21; allowed: 0 to 20"),
            ("presence_penalty", 2.1, "2.1; allowed: -2.0 to 2.0"),
            ("frequency_penalty", -2.1, "-2.1; allowed: -2.0 to 2.0"),
            ("repetition_penalty", 0, "0.0; allowed: 0.0001 to 10000"),
            ("logit_bias", [1], "[1]; expected an object of token ids, each once, with their biases"),
            ("logit_bias", {"a": 1}, "{'a': 1}; expected an object of token ids"),
            (
                "logit_bias",
                {"5": 1, "05": 2},
                "{'5': 1, '05': 2}; expected an object of token ids, each once",
            ),
            ("allowed_token_ids", [], "(); allowed: at least one token id, 0 and more"),
            ("bad_words", [""], "('',); allowed: strings that are not empty"),
            ("bad_words", ["b"] * 1025, "('b', "),
            ("best_of", 0, "0; allowed: n (1) to 128"),
            ("best_of", 64, "64; this server runs at most 32 sequences"),
            (
                "beam_width",
                3,
                "3, but belongs to a beam search; set 'use_beam_search' to true, or leave it out",
            ),
            (
                "length_penalty",
                2,
                "2.0, but belongs to a beam search; set 'use_beam_search' to true, or leave",
            ),
            ("ignore_eos", "perhaps", "'perhaps'; expected true or false"),
            ("skip_special_tokens", 2, "2; expected true or false"),
        )
    ),
    Case(sampling({"temperature": 10**400}), "'temperature' is 1000000"),
    Case(sampling({"stop_token_ids": [49152]}), "'stop_token_ids' holds 49152; allowed: 0 to 49151"),
    Case(sampling({"allowed_token_ids": [1, 99999]}), "'allowed_token_ids' holds 99999; allowed: 0 to 49151"),
    Case(sampling({"logit_bias": {"99999": 1}}), "'logit_bias' holds 99999; allowed: 0 to 49151"),
    Case(sampling({"logit_bias": {"5": 101}}), "'logit_bias' of token 5 is 101.0; allowed: token ids, 0 and"),
    # Each may be right, but not together.
    Case(sampling({"n": 3, "best_of": 2}), "'best_of' is 2; allowed: n (3) to 128"),
    Case(sampling({"min_tokens": 9, "max_tokens": 8}), "'min_tokens' is 9; allowed: 0 to max_tokens (8)"),
    Case(
        sampling({"n": 2, "best_of": 3}) | {"stream": True},
        "'best_of' is 3 and 'n' 2: which are the best is not known before all are done; set 'stream'",
    ),
    Case(
        sampling({"use_beam_search": True}), "a beam search needs a width: set 'beam_width', or 'best_of' or"
    ),
    Case(search() | {"stream": True}, "a beam search answers once, when it is done; set 'stream' to false"),
    Case(search(temperature=0.5), "'temperature' is 0.5 and 'top_k' is 0; with 'use_beam_search' nothing is"),
    Case(search(top_k=5), "'temperature' is 1.0 and 'top_k' is 5; with 'use_beam_search' nothing is sampled"),
    Case(search(n=4), "'n' is 4, but 'beam_width' is 3; allowed: up to that"),
    Case(search(best_of=4), "'beam_width' is 3, but 'best_of' is 4; give one of them"),
    Case(search(beam_width=0), "'beam_width' is 0; allowed: 1 to 128"),
    Case(search(beam_width=33), "'beam_width' is 33; this server runs at most 32 sequences"),
    *(
        Case(
            search(**{name: value}),
            f"'{name}' cannot be combined with 'use_beam_search': it is {value!r}; leave",
        )
        for name, value in (
            ("top_p", 0.5),
            ("min_p", 0.5),
            ("presence_penalty", 1.0),
            ("frequency_penalty", 1.0),
            ("repetition_penalty", 1.5),
            ("prompt_logprobs", 1),
            ("logit_bias", {5: 1.0}),
        )
    ),
]
HTTP = [case for case in CASES if fits_http(case.request) and case.only != "grpc"]
GRPC = [case for case in CASES if fits_grpc(case.request) and case.only != "http"]


def name(case: Case) -> str:
    return case.words[:60]


def test_no_row_stands_twice() -> None:
    assert len({repr(case.request) for case in HTTP}) == len(HTTP) > 150
    assert len({repr(case.request) for case in GRPC}) == len(GRPC) > 150


@pytest.mark.parametrize("case", HTTP, ids=map(name, HTTP))
@pytest.mark.usefixtures("bystander")
def test_http_answers_400_with_the_reason(llm: RunningServer, case: Case) -> None:
    status, answer = post(llm, "generate", http_body(case.request))
    assert (status, answer.keys()) == (400, {"error"})
    check_text(answer["error"], case)


@pytest.mark.parametrize("case", GRPC, ids=map(name, GRPC))
@pytest.mark.usefixtures("bystander")
def test_grpc_answers_with_the_reason(llm: RunningServer, case: Case) -> None:
    (answer,) = grpc_answers(llm, grpc_message(case.request))
    check_text(answer.error_message, case)


def check_text(error: str, case: Case) -> None:
    assert error.startswith(f"[{case.code}] {case.words}")
    assert len(error) < 600
    assert error.isprintable()


def test_a_stream_over_http_ends_with_the_error_as_its_only_event(llm: RunningServer) -> None:
    connection = connect(llm)
    connection.request("POST", "/v2/models/llm/generate_stream", encode(sampling('{"n": 0}')))
    answer = connection.getresponse().read().decode()
    connection.close()
    assert answer.strip() == """data: {"error":"[INVALID_ARG] 'n' is 0; allowed: 1 to 128"}"""


# An input or a parameter, what it is sent as, and what Triton's answer has.
TRITONS_GRPC: list[tuple[str, Any, str]] = [
    ("text_input", RawTensor("INT32", (1,), bytes(4)), "'text_input' data-type is 'INT32', but model 'llm'"),
    ("text_input", RawTensor("TEXT", (1,), A), "'text_input' data-type is '<invalid>', but model"),
    ("stream", RawTensor("BYTES", (1,), A), "'stream' data-type is 'BYTES', but model 'llm' expects 'BOOL'"),
    ("input_ids", RawTensor("INT64", (1,), bytes(8)), "'input_ids' data-type is 'INT64', but model"),
    ("input_ids", RawTensor("FP32", (1,), bytes(4)), "'input_ids' data-type is 'FP32', but model"),
    ("text_input", ["a", "b"], "unexpected shape for input 'text_input' for model 'llm'. Expected [1], got"),
    ("text_input", [], "unexpected shape for input 'text_input' for model 'llm'. Expected [1], got [0]"),
    ("text_input", RawTensor("BYTES", (), A), "'text_input' for model 'llm'. Expected [1], got []"),
    ("text_input", RawTensor("BYTES", (1, 1), A), "'text_input' for model 'llm'. Expected [1], got [1,1]"),
    ("input_ids", RawTensor("INT32", (1, 2), bytes(8)), "'input_ids' for model 'llm'. Expected [-1]"),
    ("input_ids", RawTensor("INT32", (-1,), bytes(4)), "All input dimensions should be specified"),
    ("input_ids", RawTensor("INT32", (2**40,), bytes(4)), "byte size mismatch for input 'input_ids'"),
    ("input_ids", RawTensor("INT32", (2**62,), bytes(4)), "byte size mismatch for input 'input_ids'"),
    ("input_ids", RawTensor("INT32", (1,), bytes(3)), "byte size mismatch for input 'input_ids'"),
    ("input_ids", RawTensor("INT32", (1,), bytes(8)), "byte size mismatch for input 'input_ids'"),
    ("stream", RawTensor("BOOL", (1,), bytes(2)), "byte size mismatch for input 'stream'"),
    ("text_input", RawTensor("BYTES", (1,), b""), "expected 1 string elements"),
    ("text_input", RawTensor("BYTES", (1,), A * 2), "unexpected number of string elements 2"),
    ("text_input", RawTensor("BYTES", (1,), b"\1\0"), "incomplete string length indicator"),
    ("text_input", RawTensor("BYTES", (1,), b"\xff" * 4 + b"a"), "incomplete string data"),
    ("prompt", RawTensor("BYTES", (1,), A), "unexpected inference input 'prompt' for model 'llm'"),
    ("timeout", "soon", "invalid value type for 'timeout' parameter, expected int64_param"),
    ("priority", -1, "invalid value for 'priority', expected value >= 0"),
    ("triton_top_k", 1, "parameter keys starting with 'triton_' are reserved for Triton usage"),
]
TRITONS_HTTP = [
    (b"", "failed to parse the request JSON buffer: The document is empty"),
    (b"{", "failed to parse the request JSON buffer: Missing a name for object member"),
    (b"hello", "failed to parse the request JSON buffer: Invalid value"),
    (b"[]", "attempt to get members for non-object"),
    (b"null", "attempt to get members for non-object"),
    (b'{"text_input": "a"}}', "The document root must not be followed by other values"),
    (b'{"text_input": "\\ud800"}', "The surrogate pair in string is invalid"),
    (b'{"text_input": "a\0b"}', "Missing a closing quotation mark in string"),
    (b'{"text_input": "a", "seed": ' + b"9" * 400 + b"}", "Number too big to be stored in double"),
    (b'{"text_input": 3}', "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    (b'{"text_input": null}', "Unable to parse JSON bytes array: attempt to access JSON non-string"),
    (b'{"text_input": {"a": 1}}', "Unable to parse JSON bytes array: attempt to access JSON non-string"),
    (b'{"text_input": ["a", "b"]}', "can not convert input 'text_input' to tensor with proper shape"),
    (b'{"text_input": "a", "text_input": "b"}', "input 'text_input' already exists in request"),
    (b'{"text_input": "a", "stream": "yes"}', "attempt to access JSON non-boolean as boolean"),
    (b'{"input_ids": [1.5]}', "attempt to access JSON non-signed-integer as signed-integer"),
    (b'{"input_ids": [[1, 2]]}', "Shape does not match true shape of 'data' field"),
    (b'{"text_input": "a", "stop": ["b"]}', "parameter 'stop' has invalid type. It should be either 'int'"),
    (b'{"text_input": "a", "temperature": null}', "parameter 'temperature' has invalid type. It should be"),
    (b'{"text_input": "a", "id": 5}', "Unable to parse 'id': attempt to access JSON non-string as string"),
    (b'{"text_input": "a", "x": ' + b"[" * 9999 + b"]" * 9999 + b"}", "parameter 'x' has invalid type."),
]


@pytest.mark.parametrize(("name", "value", "words"), TRITONS_GRPC)
@pytest.mark.usefixtures("bystander")
def test_triton_refuses_over_grpc_what_does_not_fit_the_model(
    llm: RunningServer, name: str, value: Any, words: str
) -> None:
    (answer,) = grpc_answers(llm, grpc_message(text() | {name: value}))
    assert words in answer.error_message


@pytest.mark.parametrize(("body", "words"), TRITONS_HTTP, ids=[words for _, words in TRITONS_HTTP])
@pytest.mark.usefixtures("bystander")
def test_triton_refuses_over_http_what_does_not_fit_the_model(
    llm: RunningServer, body: bytes, words: str
) -> None:
    status, answer = post(llm, "generate", body)
    assert status in (400, 500)
    assert answer.keys() == {"error"}
    assert words in answer["error"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("bystander")
def test_a_request_parameter_that_is_no_number(llm: RunningServer, number: float) -> None:
    words = "[INVALID_ARG] 'request parameters' holds "
    (answer,) = grpc_answers(llm, grpc_message(text(temperature=number)))
    assert answer.error_message.startswith(words)
    status, refusal = post(llm, "generate", http_body(text(temperature=number)))
    assert status == 400
    assert refusal["error"].startswith(words)


@pytest.mark.usefixtures("bystander")
def test_a_text_with_a_nul_is_a_text(llm: RunningServer) -> None:
    request = text(max_tokens=1, temperature=0) | {"text_input": "one\0two"}
    status, answer = post(llm, "generate", http_body(request))
    assert status == 200
    assert answer["text_output"].startswith("one\0two")
    (over_grpc,) = grpc_answers(llm, grpc_message(request))
    assert over_grpc.infer_response.raw_output_contents[0] == string_element(answer["text_output"])


def test_prompts_of_megabytes_are_refused_before_seconds_are_spent_on_them(llm: RunningServer) -> None:
    long = "many words " * 400_000
    chat = json.dumps([{"role": "user", "content": long}])
    for prompt in ({"text_input": long}, {"messages": chat[:1_000_000] + '"}]'}):
        started = time.monotonic()
        status, answer = post(llm, "generate", prompt)
        assert status == 400
        assert " characters; max_model_len is 512 tokens, and at most " in answer["error"]
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("field", ["id", "cache_salt"])
def test_bytes_that_are_not_utf8_in_an_id_or_a_parameter(llm: RunningServer, field: str) -> None:
    status, answer = post(llm, "generate", b'{"text_input": "a", "' + field.encode() + b'": "\xff"}')
    assert status == 400
    assert answer["error"].startswith("[INVALID_ARG] the request's id or a parameter is not UTF-8")


def test_the_server_is_as_good_as_before(llm: RunningServer) -> None:
    assert generate(llm, text_input="Hello", max_tokens=1)["text_output"].startswith("Hello")
