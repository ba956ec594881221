"""Both twins of the client behind one blocking face, so that each test of one is a test of the other."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from octavo_client import AsyncClient, AsyncStream, Client

TWINS = ("sync", "async")
MakeClient = Callable[..., Any]  # takes what `Client` takes


@contextmanager
def twin(kind: str) -> Iterator[MakeClient]:
    """Makes clients that are closed at the end."""
    with ExitStack() as stack:
        if kind == "sync":
            yield lambda *args, **options: stack.enter_context(Client(*args, **options))
            return
        runner = stack.enter_context(asyncio.Runner())

        def make(*args: Any, **options: Any) -> Blocking:
            client = Blocking(AsyncClient(*args, **options), runner)
            stack.callback(client.close)
            return client

        yield make


class Blocking:
    """An `AsyncClient` or what it returns, with its coroutines run to their end where they are called."""

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self._inner = inner
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            result = found(*args, **options)
            if inspect.iscoroutine(result):
                return self._runner.run(result)
            return Blocking(result, self._runner) if isinstance(result, AsyncStream) else result

        return call

    def __enter__(self) -> Self:
        self._runner.run(self._inner.__aenter__())
        return self

    def __exit__(self, *reason: object) -> None:
        self._runner.run(self._inner.__aexit__(*reason))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._runner.run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
