"""`/v1/chat/completions`: a conversation continued by the model's own template, and its tool calls."""

import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from octavo_client import AsyncClient, ChatOptions, Choice, Delta, SamplingParams, TokenLogprobs
from octavo_gateway.answers import DONE, Chunks, news_of, usage_of
from octavo_gateway.errors import ApiError
from octavo_gateway.schemas import LONGEST, ChatBody, NamedTool
from octavo_gateway.tools import Piece, ToolCall, ToolParser

_ROLE = '"delta":{"role":"assistant","content":""}'
_ROLES = {"developer": "system"}  # OpenAI's newer name, which no template knows


class Chat:
    """One request. `run` answers at once, `events` as it comes; call one of them."""

    def __init__(self, body: ChatBody, client: AsyncClient, options: ChatOptions, tool_parser: str) -> None:
        """Raises `ApiError`."""
        self._body = body
        self._client = client
        self._style = tool_parser
        self._id = f"chatcmpl-{options['request_id']}"
        self._created = int(time.time())
        self._messages = [_message(message, place) for place, message in enumerate(body.messages)]
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        self._functions = [str(tool.function.get("name")) for tool in tools]
        self._params = self._sampling(tools)
        self._options: ChatOptions = {**options, "return_stats": True}
        if tools:
            self._options["tools"] = [tool.model_dump() for tool in tools]
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if (value := getattr(body, name)) is not None:
                self._options[name] = value

    def _sampling(self, tools: list[Any]) -> SamplingParams:
        body = self._body
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
        limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
        others: dict[str, Any] = {
            "max_tokens": limits[0] if limits else LONGEST,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        if tools and body.skip_special_tokens is None and self._style != "hermes":
            others["skip_special_tokens"] = False  # the marks of calls are such tokens in some models
        return body.sampling(self._forced_call(), **others)

    def _forced_call(self) -> dict[str, Any] | None:
        """The structure of an answer that has to be a call."""
        choice = self._body.tool_choice
        if choice in (None, "none", "auto"):
            return None
        if not self._functions:
            raise ApiError(400, "'tool_choice' wants a call, but there are no 'tools'", param="tool_choice")
        names = [choice.function.name] if isinstance(choice, NamedTool) else self._functions
        unknown = [name for name in names if name not in self._functions]
        if unknown:
            raise ApiError(400, f"'tool_choice' names {unknown[0][:80]!r}, which is none of 'tools'")
        return {"json": {"type": "object", "properties": {"name": {"enum": names}}}}

    async def run(self) -> dict[str, Any]:
        answer = await self._client.chat(self._messages, self._params, **self._options)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._body.model,
            "system_fingerprint": None,
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": usage_of([answer]),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish_reason: str | None = choice.finish_reason
        if self._functions:
            parser = self._parser()
            pieces = parser.feed(choice.text) + parser.close()
            text = "".join(piece for piece in pieces if isinstance(piece, str))
            message["content"] = text or (None if parser.num_calls else "")
            if parser.num_calls:
                message["tool_calls"] = [p.as_dict() for p in pieces if isinstance(p, ToolCall)]
                finish_reason = _reason(finish_reason, parser)
        logprobs = None if choice.logprobs is None else self._logprobs(choice.logprobs)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    async def events(self) -> AsyncGenerator[bytes]:
        body = self._body
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = Chunks("chat.completion.chunk", self._id, self._created, body.model, with_usage=with_usage)
        stream = self._client.stream_chat(self._messages, self._params, **self._options)
        num_sequences = body.n or 1
        parsers: defaultdict[int, ToolParser] = defaultdict(self._parser)
        # The roles go with the first token: were they sent before it, the status could no longer be an error.
        began = False
        async with aclosing(news_of([stream], num_sequences)) as all_news:
            async for _, deltas in all_news:
                event = b""
                if not began:  # the server has seen `n`, and allowed it
                    began = True
                    event = b"".join(
                        chunks.choice(index, _ROLE, None, None) for index in range(num_sequences)
                    )
                for delta in deltas:
                    event += self._event(delta, chunks, parsers)
                if event:
                    yield event
        yield (chunks.usage(usage_of([stream.completion])) if with_usage else b"") + DONE

    def _event(self, delta: Delta, chunks: Chunks, parsers: Mapping[int, ToolParser]) -> bytes:
        """What of a delta can be told now; `parsers` by sequence hold back what may become a call."""
        logprobs = None if delta.logprobs is None else self._logprobs(delta.logprobs)
        if not self._functions:
            return chunks.choice(delta.index, _delta(delta.text), logprobs, delta.finish_reason)
        parser = parsers[delta.index]
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.close()
        if logprobs is not None and not pieces:
            pieces.append("")
        event = b""
        for piece in pieces:
            event += chunks.choice(delta.index, _delta(piece), logprobs, None)
            logprobs = None
        if delta.finish_reason is not None:
            event += chunks.choice(delta.index, '"delta":{}', None, _reason(delta.finish_reason, parser))
        return event

    def _parser(self) -> ToolParser:
        return ToolParser(self._style, self._functions)

    def _logprobs(self, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        most = self._body.top_logprobs or 0
        content = []
        for entries in tokens:
            best = sorted((entry for entry in entries if entry.rank <= most), key=lambda entry: entry.rank)
            tops = [_token(entry.decoded_token, entry.logprob) for entry in best]
            content.append(_token(entries[0].decoded_token, entries[0].logprob) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _delta(piece: Piece) -> str:
    if isinstance(piece, str):
        return f'"delta":{{"content":{json.dumps(piece)}}}'
    return f'"delta":{{"tool_calls":[{json.dumps({"index": piece.index, **piece.as_dict()})}]}}'


def _reason(reason: str | None, parser: ToolParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.num_calls else reason


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """With text for its content: OpenAI's clients may send a list of parts. Raises `ApiError`."""
    role = message.get("role")
    if isinstance(role, str) and role in _ROLES:
        message = {**message, "role": _ROLES[role]}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)}:
                what = f"a part of the type {kind[:80]!r}; this version reads text only"
                raise ApiError(400, f"'messages[{place}].content' has {what}", param="messages")
            case _:
                raise ApiError(400, f"'messages[{place}].content' has a part of no type", param="messages")
    return {**message, "content": "\n".join(texts)}
