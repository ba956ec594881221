"""The input `messages`: a conversation, for the model's own chat template.

Its JSON is a list of messages, or an object with such a list as `messages` and with what the template is to
know beside it. Pure but for `Chat.render`, which asks a tokenizer. Used by `codec` and `intake`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import InvalidArgument
from octavo.serving import strict_json
from octavo.values import suggestion

NAME = "messages"
_KEYS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
# The template's variables that have a place of their own.
_RESERVED = ("messages", "tools", "add_generation_prompt")


class Renderer(Protocol):
    """What a tokenizer can do for a chat; see `octavo.engine.tokenizer`."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Chat:
    """Every message has a `role`, and a `content` or, of an assistant, `tool_calls`.

    `tools` and `variables` are the template's to use. With `continue_final_message` the text ends where the
    last message does, so that the model goes on with it.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def render(self, tokenizer: Renderer) -> str:
        """Raises `InvalidArgument`: the model has no template, it refuses the messages, or it would leave out
        the tools or the end of the message to continue."""
        asked = dict(self.variables)
        if not self.add_generation_prompt:
            asked["add_generation_prompt"] = False
        plain = tokenizer.render_chat(self.messages, **asked)
        if not self.tools:
            return self._cut(plain) if self.continue_final_message else plain
        text = tokenizer.render_chat(self.messages, **asked, tools=list(self.tools))
        if text == plain:
            raise InvalidArgument(
                "'tools' are given, but the model's chat template does not use them; leave them out, or "
                "take a model that was trained to call tools"
            )
        return self._cut(text) if self.continue_final_message else text

    def _cut(self, text: str) -> str:
        content = str(self.messages[-1]["content"])
        begin = text.rfind(content)
        if begin < 0:  # many templates strip it
            content = content.strip()
            begin = text.rfind(content)
        if begin < 0:
            raise InvalidArgument(
                "'continue_final_message' is true, but the chat template changes the last message, so that "
                "its end cannot be found"
            )
        return text[: begin + len(content)]


def parse(text: str) -> Chat:
    """Raises `InvalidArgument` that names what is wrong."""
    values = strict_json.load(text, NAME)
    if isinstance(values, list):
        return Chat(_messages(values))
    if not isinstance(values, dict):
        raise InvalidArgument(
            f"'{NAME}' is JSON of {strict_json.kind(values)}; expected a list of messages, or an object "
            "that holds it"
        )
    for key in values:
        if key not in _KEYS:
            raise InvalidArgument(f"'{NAME}' has the unknown key {key[:80]!r}; {suggestion(key, _KEYS)}")
    given = {key: value for key, value in values.items() if value is not None}
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InvalidArgument(f"'chat_template_kwargs' is {strict_json.kind(variables)}; expected an object")
    for key in _RESERVED:
        if key in variables:
            raise InvalidArgument(f"'chat_template_kwargs' has {key!r}; give it beside 'messages'")
    messages = _messages(given.get("messages"))
    goes_on = _flag(given, "continue_final_message", False)
    prompts = _flag(given, "add_generation_prompt", not goes_on)
    if goes_on and prompts:
        raise InvalidArgument(
            "'continue_final_message' and 'add_generation_prompt' are both true; the one goes on with the "
            "last message, the other begins a new one: set one of them"
        )
    if goes_on and not isinstance(messages[-1].get("content"), str):
        raise InvalidArgument("'continue_final_message' is true, but the last message has no 'content'")
    return Chat(messages, _tools(given.get("tools", [])), prompts, goes_on, variables)


def _flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{key}' is {strict_json.kind(value)}; expected a boolean")
    return value


def _messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("'messages' must be a JSON list of at least one message")
    return tuple(_message(message, position) for position, message in enumerate(messages))


def _message(message: Any, position: int) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise InvalidArgument(
            f"'messages' holds {strict_json.kind(message)} at {position}; expected an object"
        )
    calls = message.get("tool_calls")
    required = ("role",) if calls and message.get("content") is None else ("role", "content")
    for key in required:
        if not isinstance(message.get(key), str):
            what = f"it is {strict_json.kind(message[key])}" if key in message else "it has none"
            raise InvalidArgument(f"message {position} must have a '{key}' that is a string; {what}")
    return message if calls is None else {**message, "tool_calls": _calls(calls, position)}


def _calls(calls: Any, position: int) -> list[Any]:
    """With arguments as values: clients of OpenAI's API send them as JSON in a string, and a template that
    writes them as JSON would make that a string in a string."""
    if not isinstance(calls, list):
        raise InvalidArgument(
            f"message {position} has 'tool_calls' that are {strict_json.kind(calls)}; expected a list"
        )
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgument(
                f"message {position} has a tool call without a function's name; expected "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            where = f"the arguments of a tool call in message {position}"
            function = {**function, "arguments": strict_json.load_object(arguments or "{}", where)}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(tools, list):
        raise InvalidArgument(f"'tools' is {strict_json.kind(tools)}; expected a list of objects")
    for position, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidArgument(f"'tools' holds {strict_json.kind(tool)} at {position}; expected an object")
    return tuple(tools)
