"""A short load on a server, and what it took. `bench` shows it; no terminal here.

Times are those that a client sees: from before a request is sent to when a response with tokens in it has
arrived. Tokens are counted by the server.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo_client._async_client import AsyncClient
from octavo_client._errors import OctavoError
from octavo_client._types import Prompt, SamplingParams

# Ids that the vocabularies in use have, and that stand for no special token.
_IDS = range(1000, 16000)
_WORD_LETTERS = "bcdfgklmnprstv"
_VOWELS = "aeiou"
_WARM_UP_TOKENS = 8  # that a request of the warm-up is to answer with

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to ask. It ends after so many `requests`, or begins none after `seconds`, whichever is first.

    `rate` requests a second begin at random moments (a Poisson process); without it the next one begins when
    one has ended. No more than `concurrency` run at once, None for no limit.
    """

    requests: int | None = None
    seconds: float | None = None
    concurrency: int | None = 8
    input_tokens: int = 128
    output_tokens: int = 64
    shared_prefix: int = 0  # of the input tokens, so many are the same in all prompts
    rate: float | None = None
    seed: int = 0
    timeout_s: float | None = None


@dataclass(slots=True)
class Sent:
    """One request. `token_times_s` are of the responses with tokens, on the same clock as `started_s`."""

    started_s: float
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    first_tokens: int = 0  # that the first of them had
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: OctavoError | None = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In ms. None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values_s: Sequence[float]) -> "Percentiles":
        """By the nearest rank."""
        ordered = sorted(values_s)
        return cls(*(_percentile(ordered, percent) for percent in PERCENTS))


def _percentile(ordered_s: Sequence[float], percent: int) -> float | None:
    if not ordered_s:
        return None
    rank = math.ceil(percent / 100 * len(ordered_s))
    return round(ordered_s[rank - 1] * 1000, 3)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that succeeded, but for `failed`. Rates are over `duration_s`, from the first request's
    start to the last end."""

    ok: int
    failed: dict[str, int]  # by code
    first_errors: dict[str, str]  # by code, the first text
    unfinished: int  # begun and given up, since the run was interrupted
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles  # to the first response with tokens
    tpot_ms: Percentiles  # a request's mean time for each token after those
    itl_ms: Percentiles  # between two responses with tokens
    e2e_ms: Percentiles


class Prompts:
    """Random and distinct, so that the prefix cache finds nothing but what `shared_prefix` asks for."""

    def __init__(self, load: Load, *, as_ids: bool) -> None:
        self._random = random.Random(load.seed)
        self._load = load
        self._as_ids = as_ids
        self.tokens_per_word = 1.0  # of a text, as the server counts
        self._prefix_ids = self._random.choices(_IDS, k=load.shared_prefix)
        self._prefix_words = [self._word() for _ in range(load.shared_prefix)]

    def next(self) -> Prompt:
        shared = self._load.shared_prefix
        own = self._load.input_tokens - shared
        if self._as_ids:
            return [*self._prefix_ids, *self._random.choices(_IDS, k=own)]
        words = self._prefix_words[: self._count(shared)]
        return " ".join([*words, *(self._word() for _ in range(self._count(own)))])

    def _count(self, tokens: int) -> int:
        return max(1, round(tokens / self.tokens_per_word)) if tokens else 0

    def _word(self) -> str:
        syllables = self._random.randint(1, 3)
        return "".join(
            self._random.choice(_WORD_LETTERS) + self._random.choice(_VOWELS) for _ in range(syllables)
        )


class Run:
    """A load under way. `sent` grows; it may be read at any time, and after an interruption."""

    def __init__(self, load: Load, client: AsyncClient, *, as_ids: bool) -> None:
        self.load = load
        self.sent: list[Sent] = []
        self._client = client
        self._prompts = Prompts(load, as_ids=as_ids)
        self._as_ids = as_ids
        self._arrivals = random.Random(load.seed + 1)
        self.started_s = time.monotonic()

    async def warm_up(self) -> int:
        """Asks as many at once as the load will, up to 16, and returns how many. Raises `OctavoError`.

        Of texts the first one tells how many tokens a word has.
        """
        if not self._as_ids:
            first = await self._ask(self._prompts.next(), _WARM_UP_TOKENS)
            self._prompts.tokens_per_word = max(first.prompt_tokens, 1) / max(self.load.input_tokens, 1)
        count = min(self.load.concurrency or 16, 16)
        done = await asyncio.gather(
            *(self._ask(self._prompts.next(), _WARM_UP_TOKENS) for _ in range(count)), return_exceptions=True
        )
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return count

    async def measure(self, tell: Callable[["Run"], None], tell_every_s: float = 0.2) -> None:
        """Until the load is over. Failures are kept, not raised."""
        self.started_s = time.monotonic()
        teller = asyncio.create_task(self._keep_telling(tell, tell_every_s))
        try:
            await (self._closed() if self.load.rate is None else self._open(self.load.rate))
        finally:
            teller.cancel()

    def figures(self) -> Figures:
        ended = [sent for sent in self.sent if sent.ended_s]
        ok = [sent for sent in ended if sent.error is None]
        errors = [sent.error for sent in ended if sent.error is not None]
        last_s = max((sent.ended_s for sent in ended), default=self.started_s)
        duration_s = last_s - self.started_s
        prompt_tokens = sum(sent.prompt_tokens for sent in ok)
        output_tokens = sum(sent.output_tokens for sent in ok)
        first_errors: dict[str, str] = {}
        for error in errors:
            first_errors.setdefault(error.code, str(error))
        answered = [sent for sent in ok if sent.token_times_s]
        per_token = [
            (sent.token_times_s[-1] - sent.token_times_s[0]) / (sent.output_tokens - sent.first_tokens)
            for sent in answered
            if sent.output_tokens > sent.first_tokens
        ]
        gaps = [
            later - sooner
            for sent in answered
            for sooner, later in zip(sent.token_times_s, sent.token_times_s[1:], strict=False)
        ]
        return Figures(
            ok=len(ok),
            failed=dict(Counter(error.code for error in errors)),
            first_errors=first_errors,
            unfinished=len(self.sent) - len(ended),
            duration_s=duration_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            requests_per_s=_per(len(ok), duration_s),
            input_tokens_per_s=_per(prompt_tokens, duration_s),
            output_tokens_per_s=_per(output_tokens, duration_s),
            ttft_ms=Percentiles.of([sent.token_times_s[0] - sent.started_s for sent in answered]),
            tpot_ms=Percentiles.of(per_token),
            itl_ms=Percentiles.of(gaps),
            e2e_ms=Percentiles.of([sent.ended_s - sent.started_s for sent in ok]),
        )

    def _wanted(self) -> bool:
        """Whether another request is to begin."""
        if self.load.requests is not None and len(self.sent) >= self.load.requests:
            return False
        return self.load.seconds is None or time.monotonic() - self.started_s < self.load.seconds

    async def _closed(self) -> None:
        async def seat() -> None:
            while self._wanted():
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency or 1):
                group.create_task(seat())

    async def _open(self, rate: float) -> None:
        seats = asyncio.Semaphore(self.load.concurrency or 1_000_000)

        async def one(due_s: float) -> None:
            async with seats:
                await self._one(due_s)

        due_s = self.started_s
        begun = 0
        async with asyncio.TaskGroup() as group:
            while self.load.requests is None or begun < self.load.requests:
                due_s += self._arrivals.expovariate(rate)
                if self.load.seconds is not None and due_s - self.started_s >= self.load.seconds:
                    break
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(one(due_s))
                begun += 1

    async def _one(self, due_s: float | None = None) -> None:
        """Its times count from `due_s`: waiting for a seat is part of them."""
        sent = Sent(time.monotonic() if due_s is None else due_s)
        self.sent.append(sent)
        try:
            await self._fill(sent, self._prompts.next(), self.load.output_tokens)
        except OctavoError as error:
            sent.error = error
            sent.ended_s = time.monotonic()

    async def _ask(self, prompt: Prompt, output_tokens: int) -> Sent:
        sent = Sent(time.monotonic())
        await self._fill(sent, prompt, min(output_tokens, self.load.output_tokens))
        return sent

    async def _fill(self, sent: Sent, prompt: Prompt, output_tokens: int) -> None:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0)
        async with self._client.stream(prompt, params, timeout_s=self.load.timeout_s) as stream:
            async for delta in stream:
                if delta.num_tokens:
                    sent.first_tokens = sent.first_tokens or delta.num_tokens
                    sent.token_times_s.append(time.monotonic())
            usage = stream.completion.usage
        sent.prompt_tokens, sent.output_tokens = usage.prompt_tokens, usage.completion_tokens
        sent.ended_s = time.monotonic()

    async def _keep_telling(self, tell: Callable[["Run"], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            tell(self)


def _per(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
