"""What the gateway costs: the same streams straight over gRPC and through it, in turns, in one run.

    python loadtest/gateway_overhead.py [--rounds 5 --streams 32 --json FILE]

Starts a server and a gateway of its own. In each round either way is measured by a client in a process of its
own, which asks for the same amount of work: `AsyncClient` straight, and through the gateway a reader of plain
sockets that decodes each event's JSON. Client, gateway, server and engine share the machine. Ends with
status 1 when a goal is missed.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octavo_client import AsyncClient, SamplingParams
from servers import REPOSITORY, gateway_before, serving

MOST_TTFT = 1.10  # through the gateway, of what it is without
LEAST_THROUGHPUT = 0.90
LONGEST_TURN_S = 300.0
VOCABULARY = 40000  # ids below that are words in SmolLM2's


@dataclass(frozen=True)
class Done:
    """One stream: when its first token came, and how many did in all."""

    ttft_s: float
    num_tokens: int


class Asker(Protocol):
    async def ask(self, prompt: list[int], num_tokens: int) -> Done: ...


class Straight:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, prompt: list[int], num_tokens: int) -> Done:
        began_s = time.perf_counter()
        first_s = None
        texts = []
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
        async with self._client.stream(prompt, params) as stream:
            async for delta in stream:
                first_s = first_s or time.perf_counter()
                texts.append(delta.text)
            return Done((first_s or 0) - began_s, stream.completion.usage.completion_tokens)


class ThroughGateway:
    """Each request on a connection of its own that was opened before, as in a client's pool."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pool: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: list[int], num_tokens: int) -> Done:
        began_s = time.perf_counter()
        reader, writer = self._pool.pop() if self._pool else await self._connect()
        body = {"model": "llm", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        content = json.dumps({**body, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        done = await read_events(reader, began_s)
        self._pool.append((reader, writer))
        return done

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)


async def read_events(reader: asyncio.StreamReader, began_s: float) -> Done:
    """One answer to its last byte. Raises ValueError for what is no stream of events."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise ValueError(f"the gateway answered {status!r}")
    first_s = None
    texts = []
    num_tokens = 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):  # an event never lies across two chunks of HTTP
            first_s = first_s or time.perf_counter()
            event = json.loads(line[6:])
            for choice in event["choices"]:
                texts.append(choice["text"])
            num_tokens = (event["usage"] or {}).get("completion_tokens", 0)
        elif line == b"0\r\n":
            await reader.readline()
            return Done((first_s or 0) - began_s, num_tokens)
    raise ValueError("the gateway closed the connection before the answer's end")


async def measure(asker: Asker, arguments: argparse.Namespace) -> dict[str, Any]:
    """The median time to first token of single streams, and the tokens a second of many at once."""
    chance = random.Random(arguments.seed)

    def prompt() -> list[int]:
        return [chance.randrange(1000, VOCABULARY) for _ in range(arguments.prompt)]

    await asyncio.gather(*(asker.ask(prompt(), 2) for _ in range(arguments.streams)))  # opens connections
    singles = [await asker.ask(prompt(), 4) for _ in range(arguments.singles)]
    began_s = time.perf_counter()
    done = await asyncio.gather(*(asker.ask(prompt(), arguments.tokens) for _ in range(arguments.streams)))
    wall_s = time.perf_counter() - began_s
    expected = arguments.streams * arguments.tokens
    if sum(one.num_tokens for one in done) != expected:
        raise ValueError(f"{sum(one.num_tokens for one in done)} tokens came; expected {expected}")
    return {
        "ttft_ms": 1000 * statistics.median(one.ttft_s for one in singles),
        "tokens_per_s": expected / wall_s,
    }


async def work(arguments: argparse.Namespace) -> None:
    """What a client's process does: prints one line of JSON."""
    if arguments.worker == "straight":
        async with AsyncClient(f"grpc://127.0.0.1:{arguments.port}") as client:
            print(json.dumps(await measure(Straight(client), arguments)))
    else:
        print(json.dumps(await measure(ThroughGateway(arguments.port), arguments)))


@contextmanager
def running() -> Iterator[dict[str, int]]:
    """A server and a gateway before it: the port of each way."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(REPOSITORY, Path(scratch) / "log") as server,
        gateway_before(server, Path(scratch) / "gateway.log") as port,
    ):
        yield {"straight": server.options.grpc_port, "gateway": port}


def take_turns(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds: each way once in each, in changing order."""
    rounds = []
    with running() as ports:
        for number in range(arguments.rounds):
            found = {}
            for way in ("straight", "gateway") if number % 2 else ("gateway", "straight"):
                command = [sys.executable, __file__, "--worker", way, "--port", str(ports[way])]
                for name in ("streams", "prompt", "tokens", "singles"):
                    command += [f"--{name}", str(getattr(arguments, name))]
                command += ["--seed", str(2 * number + (way == "gateway"))]
                ran = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST_TURN_S
                )
                found[way] = json.loads(ran.stdout)
            rounds.append(found)
    return rounds


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds, and of the ratios within each: a machine is slower at times."""
    result = {}
    for name in ("ttft_ms", "tokens_per_s"):
        for way in ("straight", "gateway"):
            result[f"{way}_{name}"] = statistics.median(found[way][name] for found in rounds)
        ratios = [found["gateway"][name] / found["straight"][name] for found in rounds]
        result[f"{name}_ratio"] = statistics.median(ratios)
    return result


def verdict(found: dict[str, float], streams: int) -> tuple[str, bool]:
    """What to print, and whether both goals are met."""
    fast = found["ttft_ms_ratio"] <= MOST_TTFT
    wide = found["tokens_per_s_ratio"] >= LEAST_THROUGHPUT
    lines = (
        "                                     straight   gateway   ratio   goal",
        f"time to first token, 1 stream (ms)   "
        f"{found['straight_ttft_ms']:8.1f}  {found['gateway_ttft_ms']:8.1f}"
        f"   {found['ttft_ms_ratio']:5.3f}   <= {MOST_TTFT:.2f}{'' if fast else '  MISSED'}",
        f"{f'output tokens a second, {streams} streams':37}"
        f"{found['straight_tokens_per_s']:8.1f}  {found['gateway_tokens_per_s']:8.1f}"
        f"   {found['tokens_per_s_ratio']:5.3f}   >= {LEAST_THROUGHPUT:.2f}{'' if wide else '  MISSED'}",
    )
    return "\n".join(lines), fast and wide


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens that each prompt has")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--singles", type=int, default=15, help="streams that run alone, for the first token")
    parser.add_argument("--json", type=Path, help="where to write all that was measured")
    parser.add_argument("--worker", choices=("straight", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        asyncio.run(work(arguments))
        return 0
    rounds = take_turns(arguments)
    found = summary(rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": rounds, "summary": found}, indent=2))
    text, met = verdict(found, arguments.streams)
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
