"""The tensors of Octavo's Triton model: one table, and the way from tensors to a call.

Pure: plain mappings of name to numpy array come in, so neither Triton nor an engine is needed to test it.
`INPUTS` and `OUTPUTS` are the contract, a superset of that of Triton's vLLM backend. The way back, from text
deltas to tensors, is `reply`. Used by `tritonserver` (sizes, table) and `intake` (parsing).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from numpy.typing import NDArray

from octavo.errors import InvalidArgument
from octavo.request import SAMPLING_NAMES, PoolingParams, SamplingParams
from octavo.serving import chat_request, embedding_request, request_parameters, strict_json
from octavo.serving.chat_request import Chat

Tensors = Mapping[str, NDArray[Any]]

MAX_PROMPT_BYTES = 8 << 20
MAX_JSON_BYTES = 1 << 20
MAX_ID_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row of the table. `length` is the only dimension, -1 for any; `max_bytes` bounds an input."""

    name: str
    data_type: Literal["BOOL", "INT32", "UINT32", "FP32", "STRING"]
    length: Literal[1, -1]
    max_bytes: int = 1
    supported: bool = True  # False: stands here so that the server lets it through to a readable error

    def config(self) -> dict[str, Any]:
        """The entry of Triton's model configuration."""
        return {"name": self.name, "data_type": f"TYPE_{self.data_type}", "dims": [self.length]}


INPUTS = (
    TensorSpec("text_input", "STRING", 1, MAX_PROMPT_BYTES),
    TensorSpec("image", "STRING", -1, MAX_PROMPT_BYTES, supported=False),
    TensorSpec("stream", "BOOL", 1),
    TensorSpec("sampling_parameters", "STRING", 1, MAX_JSON_BYTES),
    TensorSpec("exclude_input_in_output", "BOOL", 1),
    TensorSpec("return_finish_reason", "BOOL", 1),
    TensorSpec("return_cumulative_logprob", "BOOL", 1),
    TensorSpec("return_logprobs", "BOOL", 1),
    TensorSpec("return_num_input_tokens", "BOOL", 1),
    TensorSpec("return_num_output_tokens", "BOOL", 1),
    TensorSpec("embedding_request", "STRING", 1, MAX_PROMPT_BYTES),
    TensorSpec("input_ids", "INT32", -1, MAX_PROMPT_BYTES),
    TensorSpec("messages", "STRING", 1, MAX_PROMPT_BYTES),
    TensorSpec("return_token_ids", "BOOL", 1),
    TensorSpec("return_request_stats", "BOOL", 1),
    TensorSpec("return_prompt_logprobs", "BOOL", 1),
    TensorSpec("cancel_request_id", "STRING", 1, MAX_ID_BYTES),
)
OUTPUTS = (
    TensorSpec("text_output", "STRING", -1),
    TensorSpec("finish_reason", "STRING", -1),
    TensorSpec("cumulative_logprob", "FP32", -1),
    TensorSpec("logprobs", "STRING", -1),
    TensorSpec("num_input_tokens", "UINT32", 1),
    TensorSpec("num_output_tokens", "UINT32", -1),
    TensorSpec("token_ids", "INT32", -1),
    TensorSpec("request_stats", "STRING", 1),
    TensorSpec("prompt_logprobs", "STRING", 1),
)
_INPUTS = {spec.name: spec for spec in INPUTS}
_PROMPTS = ("text_input", "input_ids", "messages")


@dataclass(frozen=True, slots=True)
class Returns:
    """Which optional outputs the client asked for, by the outputs' names."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False
    request_stats: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a request brings beside its prompt, whatever is to become of that."""

    returns: Returns = Returns()
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class Generate(_Work):
    """A request to continue a prompt, as the client sent it: neither rendered nor tokenised."""

    prompt: str | tuple[int, ...] | Chat
    params: SamplingParams
    stream: bool = False
    echo: bool = False  # the prompt's text comes before the continuation's


@dataclass(frozen=True, slots=True)
class Embed(_Work):
    """A request to turn a prompt into a vector, answered once by a list of numbers, as JSON, for its text."""

    prompt: str | tuple[int, ...]
    pooling: PoolingParams


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request to end those whose client-set id is `request_id`, among those of this model instance.

    It is answered once, with one empty text, or with NOT_FOUND when there are none. Where a model has
    several instances, a client asks until one has found it.
    """

    request_id: str


def num_bytes(array: NDArray[Any]) -> int:
    """What a tensor holds; texts are objects in its array."""
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes


def check_sizes(inputs: Tensors, parameters: str = "") -> int:
    """The request's size in bytes. Raises `InvalidArgument` when an input is larger than its limit."""
    total = len(parameters)
    if total > MAX_JSON_BYTES:
        raise InvalidArgument(f"the request parameters have {total} bytes; allowed: {MAX_JSON_BYTES}")
    for name, array in inputs.items():
        spec = _INPUTS.get(name)
        if spec is None:
            raise InvalidArgument(f"unknown input {name[:80]!r}; known: {', '.join(_INPUTS)}")
        size = num_bytes(array)
        if size > spec.max_bytes:
            raise InvalidArgument(f"'{name}' has {size} bytes; allowed: {spec.max_bytes}")
        total += size
    return total


def parse(inputs: Tensors, parameters: str = "") -> Generate | Embed | Cancel:
    """What a request wants. `parameters` are its request parameters, a JSON object or nothing.

    Raises `InvalidArgument` for whatever is wrong with it, named.
    """
    if "cancel_request_id" in inputs:
        return _cancel(inputs)
    for spec in INPUTS:
        if not spec.supported and spec.name in inputs and inputs[spec.name].size:
            raise InvalidArgument(
                f"'{spec.name}' is not supported by this version, which does text generation only"
            )
    if embedding_request.NAME in inputs:
        return _embed(inputs, parameters)
    prompt = _prompt(inputs)
    stream = bool(_flag(inputs, "stream"))
    exclude = _flag(inputs, "exclude_input_in_output")
    if stream and exclude is False:
        raise InvalidArgument(
            "'exclude_input_in_output' is false; when 'stream' is true it must be true or unset"
        )
    sampling = _optional_string(inputs, "sampling_parameters")
    own, other = request_parameters.split(parameters)
    if sampling is None:
        params = SamplingParams.parse(other)
    else:
        for name in sorted(other.keys() - SAMPLING_NAMES):
            SamplingParams.parse({name: None})  # says what is wrong with the name
        params = SamplingParams.parse(strict_json.load_object(sampling, "sampling_parameters"))
    if stream and params.use_beam_search:
        raise InvalidArgument("a beam search answers once, when it is done; set 'stream' to false")
    if stream and params.num_sequences > params.n:
        raise InvalidArgument(
            f"'best_of' is {params.num_sequences} and 'n' {params.n}: which are the best is not known before "
            "all are done; set 'stream' to false, or 'best_of' to 'n'"
        )
    return Generate(
        prompt=prompt,
        params=params,
        stream=stream,
        echo=not (stream if exclude is None else exclude),
        returns=Returns(**{f.name: bool(_flag(inputs, f"return_{f.name}")) for f in fields(Returns)}),
        **own,
    )


def _cancel(inputs: Tensors) -> Cancel:
    others = sorted(inputs.keys() - {"cancel_request_id"})
    if others:
        raise InvalidArgument(
            f"'cancel_request_id' stands alone in its request; this one has {', '.join(others)} too"
        )
    request_id = _string(inputs, "cancel_request_id")
    if not request_id:
        raise InvalidArgument("'cancel_request_id' is empty; give the id that the client set on the request")
    return Cancel(request_id)


def _embed(inputs: Tensors, parameters: str) -> Embed:
    """What else such a client sends, for it uses one code for all requests, has no meaning here, except a
    second prompt. A text that is empty is none: Triton wants one where a repository declares it."""
    others = [name for name in _PROMPTS if name in inputs and (name != "text_input" or _string(inputs, name))]
    if others:
        raise InvalidArgument(
            f"the request has '{embedding_request.NAME}' and '{others[0]}'; what to embed is the "
            "'input' in the former"
        )
    prompt, pooling = embedding_request.parse(_string(inputs, embedding_request.NAME))
    own, _ = request_parameters.split(parameters)
    wanted = ("num_input_tokens", "num_output_tokens", "request_stats")
    returns = Returns(**{name: bool(_flag(inputs, f"return_{name}")) for name in wanted})
    return Embed(prompt, pooling, returns=returns, **own)


def _prompt(inputs: Tensors) -> str | tuple[int, ...] | Chat:
    given = [name for name in _PROMPTS if name in inputs]
    if len(given) != 1:
        what = " and ".join(f"'{name}'" for name in given) if given else "no prompt"
        raise InvalidArgument(f"the request has {what}; give exactly one of {', '.join(_PROMPTS)}")
    if given == ["text_input"]:
        return _string(inputs, "text_input")
    if given == ["input_ids"]:
        return tuple(inputs["input_ids"].reshape(-1).tolist())
    return chat_request.parse(_string(inputs, chat_request.NAME))


def _element(inputs: Tensors, name: str) -> Any:
    array = inputs[name]
    if array.size != 1:
        raise InvalidArgument(f"'{name}' has {array.size} elements; expected 1")
    return array.reshape(-1)[0]


def _string(inputs: Tensors, name: str) -> str:
    try:
        return bytes(_element(inputs, name)).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is not UTF-8: {error.reason} at byte {error.start}") from None


def _optional_string(inputs: Tensors, name: str) -> str | None:
    return _string(inputs, name) if name in inputs else None


def _flag(inputs: Tensors, name: str) -> bool | None:
    return bool(_element(inputs, name)) if name in inputs else None
