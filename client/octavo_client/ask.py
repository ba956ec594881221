"""`octavo generate` and `octavo chat`: a running server asked from a terminal."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from octavo_client._client import Client, Stream
from octavo_client._errors import OctavoError
from octavo_client._types import ChatMessage, Completion, SamplingParams

_INTERRUPTED = 130  # what a shell makes of Ctrl-C

Url = Annotated[
    str, typer.Option(envvar="OCTAVO_URL", help="http://HOST:PORT, https://, grpc:// or grpcs://.")
]
Model = Annotated[str, typer.Option(help="The model to ask.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Length of an answer, at most.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; the server's default is 1.")
]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of so much probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes an answer reproducible.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds that an answer may take.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    url: Url = "http://localhost:8000",
    model: Model = "llm",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    timeout: Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """Continue a text, as it is, on a running server."""
    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop or None
    )
    with _reported(), _connect(url, model, timeout) as client:
        if as_json:
            completion = client.generate(text, params, return_token_ids=True)
            print(json.dumps(dataclasses.asdict(completion), indent=2))
        else:
            with client.stream(text, params) as stream:
                _print(stream)


def chat(
    url: Url = "http://localhost:8000",
    model: Model = "llm",
    system: Annotated[str | None, typer.Option(help="How the model is to be.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    timeout: Timeout = None,
) -> None:
    """Talk to a model on a running server. Ctrl-C stops an answer, Ctrl-D ends the program."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    beginning = [] if system is None else [ChatMessage("system", system)]
    messages = list(beginning)
    with _reported(), _connect(url, model, timeout) as client:
        client.model_info()  # before anything is typed: is anybody there?
        for line in _lines():
            if line == "/new":
                messages = list(beginning)
                continue
            asked = [*messages, ChatMessage("user", line)]
            try:
                answer = _answer(client, asked, params)
            except OctavoError as error:
                _complain(error)
                continue
            if answer is not None:
                messages = [*asked, answer.message]


def _answer(client: Client, messages: list[ChatMessage], params: SamplingParams) -> Completion | None:
    """What came of it, which Ctrl-C makes shorter; None where nothing came. Raises `OctavoError`."""
    with client.stream_chat(messages, params) as stream:
        try:
            _print(stream)
        except KeyboardInterrupt:
            print(" [stopped]", flush=True)
        completion = stream.completion
    return completion if completion.text else None


def _print(stream: Stream) -> None:
    for delta in stream:
        print(delta.text, end="", flush=True)
    print(flush=True)


def _lines() -> Iterator[str]:
    """What is typed, up to Ctrl-D. Ctrl-C forgets the line."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # lines can then be edited and called back
        print("Ctrl-C stops an answer, /new begins anew, Ctrl-D ends.")
    while True:
        try:
            line = input("> " if typed else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print()
            continue
        if line:
            yield line


def _connect(url: str, model: str, timeout_s: float | None) -> Client:
    try:
        return Client(url, model=model, timeout_s=timeout_s)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None


@contextmanager
def _reported() -> Iterator[None]:
    """One line instead of a traceback for what is nobody's mistake here."""
    try:
        yield
    except OctavoError as error:
        _complain(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None


def _complain(error: OctavoError) -> None:
    print(f"error: [{error.code}] {error}", file=sys.stderr, flush=True)
