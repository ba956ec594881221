"""The input `messages` with what a template is to know beside it, and what becomes of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import InvalidArgument
from octavo.serving.chat_request import Chat, parse

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}</{{ m.role }}>{% endfor %}"
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Tokenizer:
    """What `octavo.engine.tokenizer` does about chats."""

    def __init__(self, template: str = TEMPLATE) -> None:
        self._template = ChatTemplate(template, "a test")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        return self._template.render(messages, {"add_generation_prompt": add_generation_prompt, **variables})


def render(*messages: Mapping[str, Any], **beside: Any) -> str:
    return parse(json.dumps({"messages": messages, **beside})).render(Tokenizer())


def test_a_list_and_an_object_with_that_list_are_the_same() -> None:
    assert (
        parse(json.dumps([USER])) == parse(json.dumps({"messages": [USER], "tools": None})) == Chat((USER,))
    )
    assert render(USER) == "<user>hi</user><assistant>"


def test_tools_and_variables_reach_the_template() -> None:
    text = render(USER, tools=[TOOL], chat_template_kwargs={"mood": "gay"})
    assert text == "<user>hi</user>[add]gay<assistant>"
    assert render(USER, tools=[]) == "<user>hi</user><assistant>"


def test_tools_that_the_template_does_not_know_are_refused() -> None:
    chat = parse(json.dumps({"messages": [USER], "tools": [TOOL]}))
    with pytest.raises(InvalidArgument, match="chat template does not use them"):
        chat.render(Tokenizer("{{ messages[0].content }}"))


def test_arguments_of_earlier_calls_become_values() -> None:
    called = {"role": "assistant", "content": None}
    called["tool_calls"] = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": {"a": "x"}}},
    ]
    answer = {"role": "tool", "tool_call_id": "1", "content": "2"}
    assert render(called, answer) == ('<assistant>{"a": 1}{"a": "x"}</assistant><tool>2</tool><assistant>')


def test_the_last_message_can_be_continued() -> None:
    begun = {"role": "assistant", "content": "Well, "}
    assert render(USER, begun, continue_final_message=True) == "<user>hi</user><assistant>Well, "
    assert render(USER, begun, add_generation_prompt=False).endswith("<assistant>Well, </assistant>")
    stripped = parse(json.dumps({"messages": [begun], "continue_final_message": True}))
    assert stripped.render(Tokenizer("<a>{{ messages[0].content | trim }}</a>")) == "<a>Well,"
    changed = parse(json.dumps({"messages": [begun], "continue_final_message": True}))
    with pytest.raises(InvalidArgument, match="the chat template changes the last message"):
        changed.render(Tokenizer("{{ messages[0].content | upper }}"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (1, "'messages' is JSON of a number; expected a list of messages"),
        ({"mesages": []}, "'messages' has the unknown key 'mesages'"),
        ({"tools": []}, "'messages' must be a JSON list of at least one message"),
        ({"messages": [USER], "tools": {}}, "'tools' is an object; expected a list"),
        ({"messages": [USER], "tools": ["add"]}, "'tools' holds a string at 0"),
        ({"messages": [USER], "add_generation_prompt": 1}, "'add_generation_prompt' is a number"),
        ({"messages": [USER], "chat_template_kwargs": []}, "'chat_template_kwargs' is a list"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "'chat_template_kwargs' has 'tools'"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "are both true",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "'tool_calls' that are a number"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a tool call without a function's name"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "'the arguments of a tool call in message 0' is not valid JSON",
        ),
        (
            {
                "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
                "continue_final_message": True,
            },
            "the last message has no 'content'",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "'content' that is a string; it is null"),
    ],
)
def test_what_makes_no_sense_is_refused(values: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse(json.dumps(values))
    assert text in str(raised.value)
