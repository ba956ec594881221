"""The bodies of requests: OpenAI's fields, and vLLM's beside them. Unknown fields are refused by name.

Types are checked here; values are the server's to check, whose texts say what it allows. Fields that are null
are taken out before (`security.read_json`), so None stands for "not given".

Pydantic makes an object for each mistake that it finds, so a body of megabytes must not hold a million: lists
fail at their first, and of unknown fields one is kept.
"""

from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from octavo_client import SamplingParams
from octavo_gateway.errors import ApiError

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Inputs = str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
LONGEST = 2**31 - 1  # tokens of an answer that has no limit but the context: the server cuts it there

# Fields of OpenAI's whose value changes nothing here: who asks, where it is billed, stored or cached, how
# hard to think where the model has no such thing.
_WITHOUT_EFFECT = frozenset(
    "user store metadata service_tier parallel_tool_calls prompt_cache_key prompt_cache_retention "
    "safety_identifier reasoning_effort verbosity".split()
)
# What the client has no name for.
_PASSED_ON = tuple(
    "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
    "guided_whitespace_pattern truncate_prompt_tokens spaces_between_special_tokens".split()
)


def _biases(given: Any) -> Any:
    """Raises ValueError at the first key that is no token id."""
    for key in given if isinstance(given, dict) else ():
        if not key.isdecimal():
            raise ValueError(f"the key {key[:20]!r} is no token id")
    return given


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, values: Any) -> Any:
        """So many that at least one of them is unknown, which is enough to refuse them all."""
        most = len(cls.model_fields) + 1
        return dict(islice(values.items(), most)) if isinstance(values, dict) else values


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI's: padding against who counts bytes; there is none here
    continuous_usage_stats: bool = False  # of vLLM's: usage on each chunk


class _Body(_Strict):
    model: str
    priority: Int32 | None = None
    cache_salt: str | None = None
    tenant: str | None = None


class _Sampled(_Body):
    """What completions and chats have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None

    def sampling(self, structure: dict[str, Any] | None = None, **others: Any) -> SamplingParams:
        """`others` replace what the body says; so does `structure` what it says of the answer's format."""
        names = [item.name for item in fields(SamplingParams) if item.name in _Sampled.model_fields]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        extra = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        wanted = structure or _structure(self.response_format)
        if wanted is not None:
            values["structured_outputs"] = wanted
        return SamplingParams(**values | others, extra=extra)


class CompletionBody(_Sampled):
    prompt: Inputs
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = None


class Function(BaseModel):
    name: str


class Tool(BaseModel):
    """A tool as it is sent, which is how the template gets it; only what is read here has a type."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class NamedTool(BaseModel):
    type: Literal["function"]
    function: Function


class ChatBody(_Sampled):
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(_Body):
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], values: dict[str, Any]) -> Body:
    """Raises `ApiError` that names the field."""
    try:
        return kind.model_validate({k: v for k, v in values.items() if k not in _WITHOUT_EFFECT})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = [str(part) for part in first["loc"]]
        field = path[0] if path else None
        if first["type"] == "extra_forbidden":
            raise ApiError(
                400, f"unknown field {'.'.join(path)[:80]!r}", param=field, code="unknown_parameter"
            ) from None
        if first["type"] == "missing":
            raise ApiError(400, f"the field '{'.'.join(path)}' is missing", param=field) from None
        if field in ("prompt", "input"):
            text = f"'{field}' must be a text, token ids, or a list of either"
        else:
            text = f"'{'.'.join(path)[:80]}': {first['msg']}"
        raise ApiError(400, text, param=field, code="invalid_type") from None


def _structure(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """The engine's `structured_outputs` for a `response_format`. Raises `ApiError`."""
    if response_format is None:
        return None
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
        case _:
            raise ApiError(
                400,
                "'response_format' must be of the type text, json_object, or json_schema with "
                "'json_schema': {'schema': {...}}",
                param="response_format",
            )
