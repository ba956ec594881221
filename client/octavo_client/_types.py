"""What goes into a client and what comes out of it. Values only: nothing here talks to a server.

None stands for "not set" in what goes in, where the server's default then counts, and for "not asked for" in
what comes out.
"""

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[int]  # a text, or its token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's; the server checks the values.

    `extra` is for names that this client does not know; a server that does not know them either refuses them.
    """

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None  # 16 unless set
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    structured_outputs: Mapping[str, Any] | None = None
    lora_name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """By name, what is set."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "extra"}
        return {name: value for name, value in values.items() if value is not None} | dict(self.extra)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), default=list)  # any sequence will do


class Options(TypedDict, total=False):
    """What every method that sends a request takes beside the prompt, by keyword.

    `timeout_s` counts from the call, retries included, and replaces the client's own; when it is up, the
    request is cancelled on the server and `TimedOut` is raised. `deadline_ms` is the server's to keep.
    """

    request_id: str  # a random one unless set; whoever knows it can cancel the request
    timeout_s: float | None
    deadline_ms: int
    priority: int  # the lower the sooner, where the server's scheduling policy knows priorities
    cache_salt: str  # prefixes are shared only between requests with equal salts
    tenant: str
    traceparent: str  # of W3C's trace context, as is `tracestate`
    tracestate: str
    return_token_ids: bool
    return_cumulative_logprob: bool
    return_stats: bool
    echo: bool  # the prompt's text comes before its continuation's; not in a stream


class ChatOptions(Options, total=False):
    """What methods that chat take besides: for the model's template. Servers older than this client know
    none of it."""

    tools: Sequence[Mapping[str, Any]]  # functions that the model may call, as OpenAI's API describes them
    chat_template_kwargs: Mapping[str, Any]  # the template's own variables, such as `enable_thinking`
    add_generation_prompt: bool  # true unless set: the text ends where the assistant's answer begins
    continue_final_message: bool  # the text ends where the last message does, and the answer goes on with it


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = tuple[Logprob, ...]  # of one position: the token itself first, then the likeliest others


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one sequence of a request, `index` of `n`.

    `num_tokens` are carried by `text`; `token_ids` and `logprobs` are those of exactly these tokens.
    `cumulative_logprob` is the running total. `finish_reason` stands on a sequence's last delta only.
    """

    text: str
    index: int = 0
    num_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Where a request's time went on the server, and what it was spared."""

    queue_s: float
    prefill_s: float
    decode_s: float
    cached_prompt_tokens: int
    preemptions: int
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` sequences of a request."""

    text: str
    index: int = 0
    num_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request: of `choices`, one for each of `n`, most requests have one."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage = Usage()
    model: str = ""
    model_version: str = ""
    stats: RequestStats | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # None for a prompt's first token

    @property
    def text(self) -> str:
        """Of the first sequence."""
        return self.choices[0].text if self.choices else ""

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason if self.choices else None

    @property
    def message(self) -> ChatMessage:
        """To go on with a chat: put it after the messages that it answers."""
        return ChatMessage("assistant", self.text)


@dataclass(frozen=True, slots=True)
class Embedding:
    request_id: str
    vector: tuple[float, ...]  # of length one
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Health:
    live: bool  # the server answers
    ready: bool  # all of its models are loaded
    model_ready: bool  # the one that the client asks can take requests

    def __bool__(self) -> bool:
        return self.live and self.model_ready


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model in the server's repository. `state` is Triton's: READY, LOADING, UNAVAILABLE, ..."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""  # why it is not ready, where the server says

    @property
    def ready(self) -> bool:
        return self.state == "READY"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    data_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    versions: tuple[str, ...]
    backend: str
    decoupled: bool
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    parameters: Mapping[str, str]

    def takes(self, name: str) -> bool:
        """Whether the model has an input of that name: `messages`, `embedding_request`, `cancel_request_id`
        and so on. Triton's vLLM backend has fewer than Octavo."""
        return any(tensor.name == name for tensor in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often to try, and how long to wait between: a random time up to `first_pause_s`, then up to twice
    that, and so on up to `max_pause_s`. Only an `Unavailable` that is `retryable` is tried again, and only
    while no token has come."""

    attempts: int = 3
    first_pause_s: float = 0.1
    max_pause_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Files in PEM. `ca_file`: whom to trust, instead of those whom the system trusts. `verify` False trusts
    anybody, and works over HTTP only."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Reads the files."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context
