"""The process that talks to the server under test; Locust's own process talks to no server.

Locust replaces sockets and threads by gevent's, which gRPC does not get along with, and its statistics
would delay what is to be timed. So `load_link.py` starts this program and writes it JSON lines; each
request is a task of one asyncio loop here, and a response's time is taken where it arrives.
`time.monotonic()` is one clock for all processes of a machine.

In: a configuration, then requests `{"id", "transport", "max_tokens", "ignore_eos", "prompt" | "messages"}`
and `{"cancel": id}`. Out: `{"id", "started_s", "ended_s", "token_times_s", "prompt_tokens",
"output_tokens", "error": [code, text] | null}`, and about each second `{"at_s", "metrics": {name: value}}`.
It ends when its input does.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx

from load_timeline import GAUGES
from octavo_client import (  # fmt: skip
    AsyncClient,
    ConnectionLost,
    OctavoError,
    ProtocolError,
    Retries,
    SamplingParams,
    ServerUnreachable,
    TimedOut,
)
from octavo_client._errors import from_message, from_status

_MAX_LINE_BYTES = 64 << 20
_MAX_ERROR_BYTES = 64 << 10


class Timed:
    """One request under way."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.token_times_s: list[float] = []
        self.prompt_tokens = self.output_tokens = 0

    def tokens_arrived(self) -> None:
        self.token_times_s.append(time.monotonic())

    def result(self, request_id: int, error: OctavoError | None) -> dict[str, Any]:
        return {
            "id": request_id,
            "started_s": self.started_s,
            "ended_s": time.monotonic(),
            "token_times_s": self.token_times_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "error": error and [error.code, str(error)[:300]],
        }


class OpenAI:
    """An endpoint with OpenAI's streams. The key, if there is one, is in the environment's OPENAI_API_KEY."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def ask(self, job: Mapping[str, Any], timed: Timed) -> None:
        """Raises `OctavoError`, also for what httpx raises."""
        kind = "prompt" if "prompt" in job else "messages"
        body = {
            "model": self._model,
            kind: job[kind],
            "max_tokens": job["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if job["ignore_eos"] else {}),
        }
        path = "/v1/completions" if kind == "prompt" else "/v1/chat/completions"
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    raise from_status(response.status_code, await _error_text(response))
                await self._read(response, timed)
        except httpx.TimeoutException as error:
            raise TimedOut(f"nothing came for too long: {type(error).__name__}") from error
        except httpx.ConnectError as error:
            raise ServerUnreachable(f"no connection: {error}") from error
        except httpx.HTTPError as error:
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error

    async def _read(self, response: httpx.Response, timed: Timed) -> None:
        pieces, done, usage = 0, False, None
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise from_message(_message(event), OctavoError)
            for choice in event.get("choices", ()):
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    pieces += 1
                    timed.tokens_arrived()
            usage = event.get("usage") or usage
        if not done:
            raise ProtocolError("the stream ended without [DONE]")
        # Without usage each piece of text counts as one token, which is as near as one gets.
        timed.prompt_tokens = usage["prompt_tokens"] if usage else 0
        timed.output_tokens = usage["completion_tokens"] if usage else pieces

    async def close(self) -> None:
        await self._http.aclose()


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or body)


async def _error_text(response: httpx.Response) -> str:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ERROR_BYTES:
            break
    try:
        return _message(json.loads(content))
    except ValueError:
        return content.decode(errors="replace")[:300]


class Triton:
    """A Triton server, over gRPC or HTTP."""

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._client = AsyncClient(url, model=model, timeout_s=timeout_s, retries=Retries(attempts=1))

    async def ask(self, job: Mapping[str, Any], timed: Timed) -> None:
        """Raises `OctavoError`."""
        params = SamplingParams(
            max_tokens=job["max_tokens"], temperature=0, ignore_eos=True if job["ignore_eos"] else None
        )
        stream = (
            self._client.stream(job["prompt"], params)
            if "prompt" in job
            else self._client.stream_chat(job["messages"], params)
        )
        async with stream:
            async for delta in stream:
                if delta.num_tokens:
                    timed.tokens_arrived()
            usage = stream.completion.usage
        timed.prompt_tokens, timed.output_tokens = usage.prompt_tokens, usage.completion_tokens

    async def close(self) -> None:
        await self._client.close()


class Sender:
    def __init__(self, config: Mapping[str, Any]) -> None:
        model, timeout_s = config["model"], config["timeout_s"]
        self._targets = {
            name: (OpenAI if name == "openai" else Triton)(url, model, timeout_s)
            for name, url in config["urls"].items()
        }
        self._metrics_url: str | None = config["metrics_url"]
        self._model = model
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, lines: asyncio.StreamReader) -> None:
        sampler = asyncio.create_task(self._sample()) if self._metrics_url else None
        while line := await lines.readline():
            message = json.loads(line)
            if "cancel" in message:
                if task := self._tasks.get(message["cancel"]):
                    task.cancel()
            else:
                task = asyncio.create_task(self._ask(message))
                self._tasks[message["id"]] = task
                task.add_done_callback(lambda _, request_id=message["id"]: self._tasks.pop(request_id, None))
        tasks = [*self._tasks.values(), *([sampler] if sampler else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for target in self._targets.values():
            await target.close()

    async def _ask(self, job: Mapping[str, Any]) -> None:
        timed, error = Timed(), None
        try:
            await self._targets[job["transport"]].ask(job, timed)
        except OctavoError as failure:
            error = failure
        except (ValueError, KeyError, TypeError) as failure:  # JSON of another kind
            error = ProtocolError(f"{type(failure).__name__}: {failure}")
        _write(timed.result(job["id"], error))

    async def _sample(self) -> None:
        """The server's metrics each second; what cannot be had is left out."""
        async with AsyncClient("http://127.0.0.1:1", metrics_url=self._metrics_url) as client:
            due_s = time.monotonic()
            while True:
                at_s = time.monotonic()
                with contextlib.suppress(OctavoError):
                    metrics = await client.metrics()
                    values = {}
                    for key, names in GAUGES.items():
                        for name in names:
                            if metrics.select(name):
                                values[key] = metrics.value(name)
                                break
                    _write({"at_s": at_s, "metrics": values})
                due_s = max(due_s + 1.0, time.monotonic() + 0.2)
                await asyncio.sleep(due_s - time.monotonic())


def _write(message: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    sys.stdout.buffer.flush()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        sender = Sender(json.loads(await lines.readline()))
    except ValueError as error:  # a URL that is none
        _write({"refused": str(error)})
        return
    _write({"ready": True})
    await sender.serve(lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_main())
