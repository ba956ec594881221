"""A model's chat template: messages to the text that the model was trained to see.

`engine.tokenizer` compiles one when it is loaded. Templates come with a model, from strangers, and are
programs, so they run in Jinja's sandbox, which refuses Python's internals and changes to what they are
given, with names and filters as Hugging Face defines them (that is what templates are written against).
What the sandbox leaves open is bounded here: the size of the result, and of a repeated string or list.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ConfigError, InvalidArgument

MAX_CHAT_CHARS = 2**24  # of the rendered text: more than any context length
_MAX_ERROR_CHARS = 500
_MAX_POWER_BITS = 2**12


class ChatTemplate:
    """Compiled once, rendered from any thread. Raises `ConfigError` for a template that does not compile."""

    def __init__(self, source: str, where: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"{where}: the chat template does not compile: {_text(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Raises `InvalidArgument`, with the template's own words, when it refuses the messages or fails."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidArgument("'messages' must be a list of objects, each with a 'role' and a 'content'")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidArgument(f"'messages[{i}]' must be an object with a 'role' and a 'content'")
        # Clients send `null` for what is not there; templates test whether a key is there.
        present = [{key: value for key, value in m.items() if value is not None} for m in messages]
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**variables, "messages": present}):
                size += len(piece)
                if size > MAX_CHAT_CHARS:
                    raise InvalidArgument(
                        f"the chat template makes more than {MAX_CHAT_CHARS} characters of these messages"
                    )
                pieces.append(piece)
        except InvalidArgument:
            raise
        except Exception as error:  # a template is a program: anything may come out of it
            raise InvalidArgument(f"the chat template refuses these messages: {_text(error)}") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds `*` and `**`, by which a short template could ask for any amount of memory or time."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > _MAX_POWER_BITS
            ):
                raise jinja2.TemplateRuntimeError("a power is too large")
        else:
            for value, count in ((left, right), (right, left)):
                if (
                    hasattr(value, "__len__")
                    and isinstance(count, int)
                    and len(value) * count > MAX_CHAT_CHARS
                ):
                    raise jinja2.TemplateRuntimeError("a repeated value is too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; the text inside is rendered as it is."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": _now}
    environment.globals.update(functions)
    del environment.globals["lipsum"]  # filler text, as much as asked for
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MAX_ERROR_CHARS]
