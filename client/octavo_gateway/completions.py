"""`/v1/completions`: texts or token ids continued as they are, one or several at once."""

import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from octavo_client import AsyncClient, Options, Prompt, TokenLogprobs
from octavo_gateway.answers import DONE, Chunks, all_of, news_of, usage_of
from octavo_gateway.errors import ApiError
from octavo_gateway.schemas import CompletionBody


class Completions:
    """One request. `run` answers at once, `events` as it comes; call one of them."""

    def __init__(self, body: CompletionBody, client: AsyncClient, options: Options, max_inputs: int) -> None:
        """Raises `ApiError`."""
        self._body = body
        self._client = client
        self._id = f"cmpl-{options['request_id']}"
        self._created = int(time.time())
        self._prompts = prompts_of(body.prompt, "prompt", max_inputs)
        if body.suffix:
            raise ApiError(
                400, "'suffix' is not supported: no model here fills in the middle", param="suffix"
            )
        if body.echo and body.logprobs is not None:
            message = "'echo' with 'logprobs' is not supported; ask without 'echo', or for 'logprobs' null"
            raise ApiError(400, message, param="echo")
        if body.echo and body.stream and not all(isinstance(prompt, str) for prompt in self._prompts):
            message = "'echo' of token ids cannot stream: set 'stream' to false, or send text"
            raise ApiError(400, message, param="echo")
        self._params = body.sampling(logprobs=body.logprobs)
        self._num_sequences = body.n or 1
        self._options = [
            of_input({**options, "return_stats": True}, place) for place in range(len(self._prompts))
        ]
        if body.echo and not body.stream:
            for own in self._options:
                own["echo"] = True

    async def run(self) -> dict[str, Any]:
        body = self._body
        answers = await all_of(
            [
                self._client.generate(prompt, self._params, **options)
                for prompt, options in zip(self._prompts, self._options, strict=True)
            ]
        )
        choices = [
            {
                "index": place * self._num_sequences + choice.index,
                "text": choice.text,
                "logprobs": None if choice.logprobs is None else _Logprobs(body.logprobs).of(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for place, answer in enumerate(answers)
            for choice in answer.choices
        ]
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": body.model,
            "system_fingerprint": None,
            "choices": choices,
            "usage": usage_of(answers),
        }

    async def events(self) -> AsyncGenerator[bytes]:
        body = self._body
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = Chunks("text_completion", self._id, self._created, body.model, with_usage=with_usage)
        streams = [
            self._client.stream(prompt, self._params, **options)
            for prompt, options in zip(self._prompts, self._options, strict=True)
        ]
        written: defaultdict[int, _Logprobs] = defaultdict(lambda: _Logprobs(body.logprobs))
        echoed: set[int] = set()
        async with aclosing(news_of(streams, self._num_sequences)) as all_news:
            async for place, deltas in all_news:
                event = b""
                for delta in deltas:
                    index = place * self._num_sequences + delta.index
                    text = delta.text
                    if body.echo and index not in echoed:
                        echoed.add(index)
                        text = f"{self._prompts[place]}{text}"
                    logprobs = None if delta.logprobs is None else written[index].of(delta.logprobs)
                    event += chunks.choice(index, f'"text":{json.dumps(text)}', logprobs, delta.finish_reason)
                yield event
        event = chunks.usage(usage_of([stream.completion for stream in streams])) if with_usage else b""
        yield event + DONE


class _Logprobs:
    """The log-probabilities of one sequence in the shape that completions have, part by part."""

    def __init__(self, most: int | None) -> None:
        self._most = most or 0
        self._offset = 0  # in characters, of the next token in the text

    def of(self, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        offsets = []
        for entries in tokens:
            offsets.append(self._offset)
            self._offset += len(entries[0].decoded_token)
        return {
            "tokens": [entries[0].decoded_token for entries in tokens],
            "token_logprobs": [entries[0].logprob for entries in tokens],
            "top_logprobs": [
                {
                    entry.decoded_token: entry.logprob
                    for entry in entries
                    if entry.rank <= self._most or entry is entries[0]
                }
                for entries in tokens
            ],
            "text_offset": offsets,
        }


def of_input(options: Options, place: int) -> Options:
    """The options of one of a request's inputs, under an id of its own."""
    own: Options = {**options}
    own["request_id"] = f"{options['request_id']}-{place}"
    return own


def prompts_of(given: Any, name: str, most: int) -> list[Prompt]:
    """A text, token ids, or a list of either, as a list of one sort. Raises `ApiError`."""
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts: list[Prompt] = given if several else [given]
    if given == []:
        raise ApiError(400, f"{name!r} is an empty list; give at least one text", param=name)
    if len(prompts) > most:
        message = f"{name!r} has {len(prompts)} entries; this gateway allows {most} in one request"
        raise ApiError(400, message, param=name)
    return prompts
