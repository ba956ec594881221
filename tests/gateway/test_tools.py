"""Calls in a model's text, however it is cut into deltas."""

import json

import pytest

from octavo_gateway.tools import ToolCall, ToolParser

HERMES = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'


def read(style: str, text: str, size: int) -> tuple[str, list[tuple[str, object]]]:
    """All text, and all calls with their arguments, of a text that comes in pieces of that size."""
    parser = ToolParser(style, ["add", "sub"])
    pieces = []
    for begin in range(0, len(text), size):
        pieces += parser.feed(text[begin : begin + size])
    pieces += parser.close()
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls))) == list(range(parser.num_calls))
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("style", "text", "words", "calls"),
    [
        ("hermes", HERMES, "Let me see.\n", [("add", {"a": 1})]),
        ("auto", HERMES + HERMES, "Let me see.\nLet me see.\n", [("add", {"a": 1})] * 2),
        ("auto", '{"name": "add", "parameters": {"a": 2}}', "", [("add", {"a": 2})]),
        (
            "llama3",
            '<|python_tag|>{"name": "add", "parameters": {}}; '
            '{"name": "sub", "parameters": {"b": "ü"}}<|eom_id|>',
            "",
            [("add", {}), ("sub", {"b": "ü"})],
        ),
        (
            "auto",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": [1]}}, {"name": "sub", "arguments": {}}]',
            "",
            [("add", {"a": [1]}), ("sub", {})],
        ),
        ("mistral", 'So: [TOOL_CALLS]add[ARGS]{"a": 3}</s>', "So: ", [("add", {"a": 3})]),
        # What begins like a call and is none is text, all of it.
        ("auto", "1 < 2 <tool_cal", "1 < 2 <tool_cal", []),
        ("auto", "<tool_call>oh no</tool_call> I", "<tool_call>oh no</tool_call> I", []),
        ("hermes", '<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
        ("auto", '{"name": "mul", "parameters": {}}', '{"name": "mul", "parameters": {}}', []),
        ("auto", '{"answer": 4}', '{"answer": 4}', []),
        ("auto", "[TOOL_CALLS] are a mark", "[TOOL_CALLS] are a mark", []),
        ("hermes", '{"name": "add", "parameters": {}}', '{"name": "add", "parameters": {}}', []),
        ("auto", "  \n", "  \n", []),
        ("auto", '<tool_call>{"name": 1, "arguments": 2}</tool_call>', None, []),
    ],
)
def test_text_and_calls_are_told_apart(
    style: str, text: str, words: str | None, calls: list[object], size: int
) -> None:
    assert read(style, text, size) == (text if words is None else words, calls)


def test_text_before_a_call_is_given_out_at_once() -> None:
    parser = ToolParser("auto", ["add"])
    assert parser.feed("Wait") == ["Wait"]
    assert parser.feed(" <") == [" "]
    assert parser.feed("3 <tool_call>") == ["<3 "]
    assert parser.feed('{"name": "add", "arguments": "{}"}') == []
    (call,) = parser.feed("</tool_call>")
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("add", "{}")
