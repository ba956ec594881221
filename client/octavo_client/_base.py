"""What the twins `Client` and `AsyncClient` share: requests are built and attempts counted here. No I/O."""

import copy
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn, Self, cast
from urllib.parse import urlsplit

from octavo_client._errors import NoAdapters, OctavoError
from octavo_client._types import (
    ChatMessage,
    ChatOptions,
    ModelInfo,
    ModelState,
    Options,
    Prompt,
    Retries,
    SamplingParams,
    TensorInfo,
)

Messages = Sequence[ChatMessage | Mapping[str, Any]]
Value = str | bool | tuple[int, ...]

ASK_TIMEOUT_S = 10.0  # for what needs no model: health, metadata, metrics
METRICS_PORT = 8002  # Triton's default
CANCEL_TIMEOUT_S = 2.0  # for a cancelled request to end; its connection is cut then
CANCEL_PAUSE_S = 0.01  # before asking again for a request that no instance of the model had

_PARAMETERS = {"priority": "octavo_priority", "deadline_ms": "octavo_deadline_ms"}
_RETURNS = {"return_stats": "return_request_stats"}
_OF_TEMPLATES = tuple(ChatOptions.__annotations__.keys() - Options.__annotations__.keys())


class Question(Enum):
    """What can be asked about a server and a model without generating anything."""

    LIVE = "live"
    READY = "ready"
    MODEL_READY = "model_ready"
    METADATA = "metadata"
    CONFIG = "config"
    MODELS = "models"  # all of the repository, whatever model is asked about


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request as a transport carries it: the tensors by name, and the request parameters."""

    model: str
    version: str  # "" for the server's choice
    request_id: str
    inputs: Mapping[str, Value]
    parameters: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.inputs.get("stream") is True

    @property
    def prompt(self) -> Value | list[dict[str, Any]]:
        """The text, the token ids, or the list of messages."""
        if "messages" in self.inputs:
            values = json.loads(str(self.inputs["messages"]))
            messages: list[dict[str, Any]] = values["messages"] if isinstance(values, dict) else values
            return messages
        return self.inputs.get("input_ids", self.inputs.get("text_input", ""))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are set."""
        values: dict[str, Any] = json.loads(str(self.inputs.get("sampling_parameters", "{}")))
        return values

    def cancelling(self) -> "WireRequest":
        """The request that ends this one, in whichever state it is."""
        return replace(
            self,
            request_id=f"{self.request_id}-cancel",
            inputs={"cancel_request_id": self.request_id},
            parameters={},
        )


class Deadline:
    """A moment, or never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at_s = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """At least 0; None when there is no end."""
        return None if self._at_s is None else max(0.0, self._at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0


class Attempts:
    """How often a request was tried, and whether it may be tried again."""

    def __init__(self, retries: Retries, deadline: Deadline) -> None:
        self._retries = retries
        self._deadline = deadline
        self._failed = 0

    def pause_s(self, error: OctavoError, answered: bool) -> float | None:
        """After a failure: how long to wait before the next try, or None when there is to be none."""
        self._failed += 1
        if answered or not error.retryable or self._failed >= self._retries.attempts:
            return None
        longest_s = min(self._retries.first_pause_s * 2 ** (self._failed - 1), self._retries.max_pause_s)
        pause_s = random.uniform(0, longest_s)
        left_s = self._deadline.left_s
        return pause_s if left_s is None or pause_s < left_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The options of a request, by default not set. An unknown name is a TypeError here."""

    request_id: str | None = None
    timeout_s: float | None = None
    deadline_ms: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    return_token_ids: bool = False
    return_cumulative_logprob: bool = False
    return_stats: bool = False
    echo: bool = False


class BaseClient:
    """Builds the requests of one client."""

    def __init__(
        self, *, model: str, model_version: str, timeout_s: float | None, retries: Retries | None
    ) -> None:
        self.model = model
        self.model_version = model_version
        self._timeout_s = timeout_s
        self._retries = retries or Retries()

    def for_model(self, model: str, model_version: str = "") -> Self:
        """The same client for another model of its server, on the same connection: close only one of them."""
        other = copy.copy(self)
        other.model, other.model_version = model, model_version
        return other

    def _generation(
        self,
        prompt: Prompt | Mapping[str, Value],
        params: SamplingParams | None,
        stream: bool,
        options: Options,
    ) -> WireRequest:
        """`prompt`: what `generate` takes, or the inputs that stand for it."""
        sent = _Sent(**options)
        sampling = params or SamplingParams()
        inputs = dict(prompt) if isinstance(prompt, Mapping) else _prompt(prompt)
        inputs |= {
            "stream": stream,
            "exclude_input_in_output": not sent.echo,
            "sampling_parameters": sampling.to_json(),
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        if sampling.logprobs is not None:
            inputs["return_logprobs"] = True
        if sampling.prompt_logprobs is not None:
            inputs["return_prompt_logprobs"] = True
        for name in ("return_token_ids", "return_cumulative_logprob", "return_stats"):
            if getattr(sent, name):
                inputs[_RETURNS.get(name, name)] = True
        return self._request(inputs, sent)

    def _embedding(
        self, prompt: Prompt, pooling: str | None, dimensions: int | None, options: Options
    ) -> WireRequest:
        pooling_params = {"pooling": pooling, "dimensions": dimensions}
        asked: dict[str, Any] = {"input": prompt if isinstance(prompt, str) else list(prompt)}
        asked["pooling_params"] = {name: value for name, value in pooling_params.items() if value is not None}
        # A repository made for Triton's vLLM backend may declare the text to be required.
        inputs: dict[str, Value] = {"embedding_request": json.dumps(asked), "text_input": ""}
        return self._request({**inputs, "return_num_input_tokens": True}, _Sent(**options))

    def _request(self, inputs: Mapping[str, Value], sent: _Sent) -> WireRequest:
        parameters: dict[str, str | int] = {}
        for name in ("priority", "deadline_ms", "cache_salt", "tenant", "traceparent", "tracestate"):
            value = getattr(sent, name)
            if value is not None:
                parameters[_PARAMETERS.get(name, name)] = value
        request_id = sent.request_id or uuid.uuid4().hex
        return WireRequest(self.model, self.model_version, request_id, inputs, parameters)

    def _cancellation(self, request_id: str) -> WireRequest:
        return WireRequest(self.model, self.model_version, request_id, {}).cancelling()

    def _limits(self, options: Options) -> tuple[Deadline, Attempts]:
        """Until when a request may take, and the tries for it: none is made after the server's deadline."""
        timeout_s = options.get("timeout_s", self._timeout_s)
        ends_s = [timeout_s, options["deadline_ms"] / 1000 if "deadline_ms" in options else None]
        last_try = Deadline(min((end_s for end_s in ends_s if end_s is not None), default=None))
        return Deadline(timeout_s), Attempts(self._retries, last_try)

    def _refuse_adapter(self, name: str) -> NoReturn:
        raise NoAdapters(
            f"the adapter {name!r} cannot be loaded or unloaded: the model {self.model!r} has no input for "
            "that; adapters are named by `SamplingParams.lora_name` where a server has them from its start"
        )


def chat_inputs(messages: Messages, options: ChatOptions) -> tuple[dict[str, Value], Options]:
    """The input that stands for a prompt in a chat, and the options that are not in it."""
    content = [
        {"role": message.role, "content": message.content} if isinstance(message, ChatMessage) else message
        for message in messages
    ]
    others: dict[str, Any] = dict(options)
    beside = {name: others.pop(name) for name in _OF_TEMPLATES if name in others}
    value = {"messages": content, **beside} if beside else content
    return {"messages": json.dumps(value, default=_plain)}, cast(Options, others)


def _plain(value: Any) -> Any:
    """Any mapping and any sequence will do."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def _prompt(prompt: Prompt) -> dict[str, Value]:
    return {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": tuple(prompt)}


def model_states(answer: Mapping[str, Any]) -> tuple[ModelState, ...]:
    """From the answer to `Question.MODELS`."""
    names = ("name", "version", "state", "reason")
    return tuple(
        ModelState(**{name: str(model[name]) for name in names if name in model})
        for model in answer.get("models", ())
    )


def model_info(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> ModelInfo:
    """From what the server says of a model: its metadata and its configuration, as JSON."""

    def tensors(name: str) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(tensor["name"], tensor["datatype"], tuple(map(int, tensor.get("shape", ()))))
            for tensor in metadata.get(name, ())
        )

    parameters = config.get("parameters", {})
    return ModelInfo(
        metadata["name"],
        tuple(metadata.get("versions", ())),
        config.get("backend", ""),
        bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        tensors("inputs"),
        tensors("outputs"),
        {name: value.get("string_value", "") for name, value in parameters.items()},
    )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `transport` is "http" or "grpc"; `netloc` is HOST:PORT."""

    transport: str
    netloc: str
    secure: bool
    metrics_url: str

    @classmethod
    def parse(cls, url: str, metrics_url: str | None) -> Self:
        """Raises ValueError for a URL of another kind."""
        parts = urlsplit(url)
        schemes = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 8001}
        if parts.scheme not in schemes or not parts.hostname or parts.path.strip("/"):
            raise ValueError(
                f"{url!r} is no server's URL; write http://HOST:PORT, https://, grpc:// or grpcs://"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(
            parts.scheme[:4],
            f"{host}:{parts.port or schemes[parts.scheme]}",
            parts.scheme in ("https", "grpcs"),
            metrics_url or f"http://{host}:{METRICS_PORT}/metrics",
        )
