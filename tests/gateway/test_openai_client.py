"""The official Python client against the gateway on a real socket: what it reads, and leaving."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateways import HELLO, listening
from octavo_client import MockTransport, Unavailable, WireRequest

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="key", **options)


def test_tool_calls_at_once_and_in_a_stream() -> None:
    mock = MockTransport(lambda _: ["I add. ", CALL])
    asked: dict[str, Any] = {"model": "llm", "messages": HELLO, "tools": [TOOL]}
    with listening(mock, api_keys=("key",)) as url, client(url) as ai:
        choice = ai.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
        with ai.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "I add. "
        assert final.message.tool_calls[0].function.name == "add"


def test_it_sends_a_full_queue_s_request_again() -> None:
    left = iter([True, False])

    def answer(_: WireRequest) -> str:
        if next(left):
            raise Unavailable("1 request waits already, and max_queue_size is 1")
        return "Hi"

    with listening(MockTransport(answer)) as url, client(url, max_retries=1) as ai:
        answered = ai.chat.completions.create(model="llm", messages=HELLO)
        assert answered.choices[0].message.content == "Hi"
    with (
        listening(MockTransport(lambda _: breaking())) as url,
        client(url) as ai,
        pytest.raises(openai.APIError, match="shutting down"),
    ):
        list(ai.chat.completions.create(model="llm", messages=HELLO, stream=True))


def breaking() -> Iterator[str]:
    yield "a"
    yield "b"
    raise Unavailable("shutting down")


def test_a_wrong_key_is_its_authentication_error() -> None:
    with (
        listening(MockTransport(lambda _: "Hi"), api_keys=("other",)) as url,
        client(url) as ai,
        pytest.raises(openai.AuthenticationError),
    ):
        ai.models.list()


class Patient(MockTransport):
    """Answers nothing until it is left, as a server does whose queue is long."""

    def __init__(self) -> None:
        super().__init__(lambda _: "never")
        self.asked = threading.Event()
        self.gone = threading.Event()

    async def asend(self, request: WireRequest, deadline: Any) -> Any:
        del deadline
        self.requests.append(request)
        self.asked.set()
        return _Waiting(self)


class _Waiting:
    waiting = False

    def __init__(self, transport: Patient) -> None:
        self._transport = transport

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()

    async def aleave(self) -> None:
        self._transport.gone.set()


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_cancels(stream: bool) -> None:
    patient = Patient()
    with listening(patient) as url, client(url, timeout=0.3, max_retries=0) as ai:
        with pytest.raises(openai.APITimeoutError):
            ai.chat.completions.create(model="llm", messages=HELLO, stream=stream)
        assert patient.asked.is_set()
        began_s = time.monotonic()
        assert patient.gone.wait(5)
        assert time.monotonic() - began_s < 2
