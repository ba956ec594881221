"""Chat templates: what Hugging Face's render, and what a hostile one must not do."""

import datetime
import json
import re
from typing import Any

import pytest

from octavo.engine import chat_template
from octavo.engine.chat_template import ChatTemplate
from octavo.errors import ConfigError, InvalidArgument

MESSAGES = [{"role": "user", "content": "<b>é🙂</b>"}, {"role": "assistant", "content": "yes"}]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, "here").render(messages, variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
        "{{ messages | tojson }} {{ {'b': 1, 'a': [2]} | tojson(indent=2) }}",
        "{{ {'b': '<é>', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
        "{% generation %}{{ messages[0].content | upper }}{% endgeneration %}!\n",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1) }} {{ 'x' * 3 }} {{ 2 ** 10 }} {{ [1] * 2 }} {{ range(3) | list }}",
        "{{ bos_token }}{{ tools is none }}{{ messages[0].get('name') is none }}",
        "{{ messages[1].name is defined }}{{ messages[1].name }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_renders_as_transformers_does(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=source, tools=None, add_generation_prompt=True, **variables
    )
    assert render(source, tools=None, add_generation_prompt=True, **variables) == expected[0]


def test_a_key_that_is_null_is_not_there() -> None:
    assert render("{{ 'name' in messages[0] }}", [{"role": "user", "content": "x", "name": None}]) == "False"


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == datetime.datetime.now().strftime("%Y-%m-%d")


def test_what_the_template_says_reaches_the_caller() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first, please') }}{% endif %}"
    with pytest.raises(
        InvalidArgument, match="the chat template refuses these messages: system first, please"
    ):
        render(source)
    assert render(source, [{"role": "system", "content": ""}]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "{{ 'a' + 1 }}",
        "{{ none() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ {1: set()} | tojson }}",
    ],
)
def test_a_template_that_fails(source: str) -> None:
    with pytest.raises(InvalidArgument, match=r"the chat template refuses these messages: \S") as caught:
        render(source)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '%s' | format(messages.__class__) }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{% set x = messages.append({}) %}",
        "{% set x = messages[0].update({'role': 'x'}) %}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_the_sandbox_gives_nothing_away(source: str) -> None:
    messages = [dict(m) for m in MESSAGES]
    try:
        told = render(source, messages)  # printing what is forbidden prints nothing; using it is an error
    except InvalidArgument as error:
        told = str(error).removeprefix("the chat template refuses these messages: ")
    assert told == "" or re.search(r"unsafe|undefined|no loader|is not safely callable", told), told
    assert not re.search(r"<class|<function|root:", told)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ ['x'] * 10**10 }}",
        "{{ 10**(10**8) }}",
        "{{ 10**1000**1000 }}",
        "{{ (10**1000)**1000 }}",
        "{{ messages[0].content * 10**9 }}",
        "{{ range(10) | list * 10**9 }}",
    ],
)
def test_bombs_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHAT_CHARS", 2**20)
    with pytest.raises(InvalidArgument):
        render(source)


def test_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHAT_CHARS", 100)
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "x" * 100}]) == "x" * 100
    with pytest.raises(InvalidArgument, match="makes more than 100 characters of these messages"):
        render("{{ messages[0].content }}", [{"role": "user", "content": "x" * 101}])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "'messages' must be a list"),
        ({"role": "user"}, "'messages' must be a list"),
        (None, "'messages' must be a list"),
        (["hello"], r"'messages\[0\]' must be an object"),
        ([MESSAGES[0], {"content": "x"}], r"'messages\[1\]' must be an object with a 'role'"),
        ([{"role": 3}], r"'messages\[0\]' must be an object with a 'role'"),
    ],
)
def test_messages_that_are_none(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        render("x", messages)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for %}", "{% unknown %}", "{{ x | nothing }}", "(" * 5000]
)
def test_a_template_that_does_not_compile(source: str) -> None:
    if source.startswith("("):
        source = "{{ " + source + " }}"
    with pytest.raises(ConfigError, match="here: the chat template does not compile: "):
        ChatTemplate(source, "here")


def test_a_conversation_round_trips_through_json() -> None:
    assert json.loads(render("{{ messages | tojson }}")) == MESSAGES
