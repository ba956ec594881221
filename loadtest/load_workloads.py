"""What a load test asks: seeded generators of four kinds of work and their mix, or a user's JSON lines.

Request number i of a workload depends on the seed and on i alone, so that it is the same whoever asks it,
in however many users. Lengths are log-normal. Used by `load_session.py`; knows nothing of servers and of
time.

A file has one request a line, in UTF-8:

    {"prompt": "Once upon a time", "max_tokens": 64}
    {"messages": [{"role": "user", "content": "Name three fruits."}], "max_tokens": 32, "at_s": 1.5}

`max_tokens` may be left out; `at_s`, seconds after the test's begin, counts with `--arrivals trace` only.
Such a request ends where the model ends it; generated ones ask for their whole length (`ignore_eos`), so
that the same seed is the same work on every server.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LINES = 100_000
MAX_TOKENS = 100_000
DEFAULT_MAX_TOKENS = 64  # of a line that does not say

_WORDS = (
    "the of and to in that it was for on are with as they be at one have this from by had not but what "
    "some we can out other were all there when up use your how said each she which their time will way "
    "about many then them would write like so these her long make thing see him two has look more day "
    "could go come did my sound no most number who over know water than call first people may down side "
    "been now find any new work part take get place made live where after back little only round man year "
    "came show every good me give our under name very through just form much great think say help low "
    "line before turn cause same mean differ move right boy old too does tell sentence set three want air "
    "well also play small end put home read hand port large spell add even land here must big high such "
    "follow act why ask men change went light kind off need house picture try us again animal point "
    "mother world near build self earth father head stand own page should country found answer school "
    "grow study still learn plant cover food sun four thought let keep"
).split()
_NAMES = (
    "item value total index left right node key cache limit offset window queue block table weight".split()
)
_ACTIONS = "find merge count sort split read write update remove insert collect reduce parse group".split()


@dataclass(frozen=True, slots=True)
class Job:
    """One request. It has a `prompt` or `messages`, never both."""

    workload: str
    max_tokens: int
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    ignore_eos: bool = True
    at_s: float | None = None


class Workload(Protocol):
    name: str

    def job(self, index: int) -> Job: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal: half are shorter than `median`, two thirds within a factor of e^`sigma` of it."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(max(1, round(self.median * rng.lognormvariate(0, self.sigma))), self.most)


@dataclass(frozen=True, slots=True)
class Generated:
    """`make(rng, words)` writes a request around `input_words` words, some 1.3 tokens each."""

    name: str
    seed: int
    input_words: Lengths
    output_tokens: Lengths
    make: Callable[[random.Random, int, int], Mapping[str, Any]]

    def job(self, index: int) -> Job:
        rng = random.Random(f"{self.seed}:{self.name}:{index}")
        words, tokens = self.input_words.draw(rng), self.output_tokens.draw(rng)
        return Job(self.name, tokens, **self.make(rng, words, self.seed))


@dataclass(frozen=True, slots=True)
class Mix:
    """Each request is of one of `parts`, by their weights."""

    name: str
    seed: int
    parts: tuple[tuple[Workload, float], ...]

    def job(self, index: int) -> Job:
        rng = random.Random(f"{self.seed}:mix:{index}")
        workloads, weights = zip(*self.parts, strict=True)
        return rng.choices(workloads, weights)[0].job(index)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A user's file, over and over."""

    name: str
    jobs: tuple[Job, ...]

    def job(self, index: int) -> Job:
        return self.jobs[index % len(self.jobs)]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A workload whose answers have at most so many tokens."""

    workload: Workload
    max_tokens: int

    @property
    def name(self) -> str:
        return self.workload.name

    def job(self, index: int) -> Job:
        job = self.workload.job(index)
        return replace(job, max_tokens=min(job.max_tokens, self.max_tokens))


def text(rng: random.Random, words: int) -> str:
    """Sentences of common words."""
    sentences = []
    while words > 0:
        length = min(rng.randint(6, 16), words)
        words -= length
        sentences.append(" ".join(rng.choices(_WORDS, k=length)).capitalize() + ".")
    return " ".join(sentences)


def _chat(rng: random.Random, words: int, seed: int) -> dict[str, Any]:
    del seed
    turns = [{"role": "system", "content": "You are a helpful assistant. Answer in full sentences."}]
    for _ in range(rng.choice((0, 0, 1, 2))):
        turns.append({"role": "user", "content": text(rng, max(words // 3, 1))})
        turns.append({"role": "assistant", "content": text(rng, max(words // 3, 1))})
    turns.append({"role": "user", "content": text(rng, words)})
    return {"messages": tuple(turns)}


def _code(rng: random.Random, words: int, seed: int) -> dict[str, Any]:
    """The beginning of a module, cut off inside a function."""
    del seed
    lines = ["from collections import deque", ""]
    while words > 0:
        action, first, second = rng.choice(_ACTIONS), *rng.sample(_NAMES, 2)
        lines += [
            f"def {action}_{first}({first}, {second}=None):",
            f'    """{text(rng, 8)}"""',
            f"    if {second} is None:",
            f"        {second} = deque(maxlen={rng.randint(2, 512)})",
            f"    for step, entry in enumerate({first}):",
            f"        {second}.append(entry * {rng.randint(2, 99)} + step)",
            f"    return {second}",
            "",
        ]
        words -= 40
    lines += [f"def {rng.choice(_ACTIONS)}_{rng.choice(_NAMES)}s(values):", "    result = []", "    for "]
    return {"prompt": "\n".join(lines)}


def _summarise(rng: random.Random, words: int, seed: int) -> dict[str, Any]:
    del seed
    return {"prompt": f"{text(rng, words)}\n\nSummary of the text above in three sentences:"}


def _shared_prefix(rng: random.Random, words: int, seed: int) -> dict[str, Any]:
    """One of four system prompts, the first the most common, and a short question of its own."""
    which = rng.choices(range(4), (8, 4, 2, 1))[0]
    system = text(random.Random(f"{seed}:system:{which}"), 380)
    return {
        "messages": (
            {"role": "system", "content": system},
            {"role": "user", "content": text(rng, words)},
        )
    }


_KINDS = {
    "chat": (Lengths(40, 0.7, 400), Lengths(64, 0.5, 256), _chat),
    "code": (Lengths(160, 0.6, 1200), Lengths(32, 0.5, 128), _code),
    "summarise": (Lengths(700, 0.3, 2500), Lengths(48, 0.3, 128), _summarise),
    "shared-prefix": (Lengths(24, 0.5, 200), Lengths(48, 0.5, 192), _shared_prefix),
}
MIX = {"chat": 5.0, "code": 3.0, "summarise": 1.0, "shared-prefix": 3.0}


def parse(spec: str, seed: int) -> Workload:
    """A workload from the command line: a kind, `mix`, `chat=2,code=1`, or a file's name.

    Raises ValueError that says what is allowed, or which line of the file is wrong.
    """
    if spec in _KINDS:
        return _generated(spec, seed)
    if spec == "mix":
        return Mix("mix", seed, tuple((_generated(name, seed), weight) for name, weight in MIX.items()))
    if spec.endswith((".jsonl", ".json")):
        return Recorded(Path(spec).name, read(Path(spec)))
    if "=" in spec:
        return Mix(spec, seed, tuple(_part(part, seed) for part in spec.split(",")))
    raise ValueError(
        f"--workload {spec!r} is none; allowed: {', '.join(_KINDS)}, mix, shares of these such as "
        "chat=2,code=1, or a file whose name ends in .jsonl"
    )


def _generated(name: str, seed: int) -> Generated:
    inputs, outputs, make = _KINDS[name]
    return Generated(name, seed, inputs, outputs, make)


def _part(part: str, seed: int) -> tuple[Workload, float]:
    name, _, weight = part.partition("=")
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if name not in _KINDS or not 0 < share < 1e6:
        raise ValueError(
            f"--workload: {part!r} is no share of a workload; write NAME=WEIGHT, NAME one of "
            f"{', '.join(_KINDS)} and WEIGHT a number above 0"
        )
    return _generated(name, seed), share


def read(path: Path) -> tuple[Job, ...]:
    """Raises ValueError that names the line, and OSError where there is no such file."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read: take a part of it")
    jobs: list[Job] = []
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path}:{number}: a line has at most {MAX_LINE_BYTES} bytes")
            if line.strip():
                if len(jobs) == MAX_LINES:
                    raise ValueError(
                        f"{path}:{number}: more than {MAX_LINES} requests: take a part of the file"
                    )
                try:
                    jobs.append(_job(json.loads(line), path.stem))
                except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
                    raise ValueError(f"{path}:{number}: {error}") from None
    if not jobs:
        raise ValueError(f"{path} has no request in it; one a line, such as {{'prompt': '...'}} in JSON")
    return tuple(jobs)


def _job(line: Any, name: str) -> Job:
    if not isinstance(line, dict):
        raise ValueError('a line is a JSON object, as in {"prompt": "...", "max_tokens": 64}')
    if unknown := sorted(line.keys() - {"prompt", "messages", "max_tokens", "at_s"}):
        raise ValueError(f"{unknown[0]!r} is not known; allowed: prompt, messages, max_tokens, at_s")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("either 'prompt' or 'messages' must be there, and not both")
    max_tokens, at_s = line.get("max_tokens", DEFAULT_MAX_TOKENS), line.get("at_s")
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise ValueError(f"'max_tokens' is {max_tokens!r}; allowed: 1 to {MAX_TOKENS}")
    if at_s is not None and (type(at_s) not in (int, float) or not 0 <= at_s < 1e7):
        raise ValueError(f"'at_s' is {at_s!r}; allowed: seconds from 0 on")
    if "prompt" in line:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ValueError("'prompt' must be a text that is not empty")
        return Job(name, max_tokens, prompt=line["prompt"], ignore_eos=False, at_s=at_s)
    return Job(name, max_tokens, messages=_messages(line["messages"]), ignore_eos=False, at_s=at_s)


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    wrong = ValueError('\'messages\' must be a list of {"role": "...", "content": "..."}')
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise wrong
    for message in value:
        if not isinstance(message, dict) or {"role", "content"} - message.keys():
            raise wrong
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            raise wrong
    return tuple(value)
