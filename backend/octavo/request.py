"""What a caller asks for and what comes back, free of any transport.

`SamplingParams.parse` is the one place where names and ranges of sampling parameters are checked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from octavo.errors import InvalidArgument, OctavoError

FinishReason = Literal["stop", "length"]

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all together
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20

# Names of vLLM's that this version has no code for; they are refused by name rather than ignored.
_UNSUPPORTED = frozenset(
    "best_of presence_penalty frequency_penalty repetition_penalty prompt_logprobs bad_words logit_bias "
    "allowed_token_ids use_beam_search beam_width length_penalty early_stopping guided_json guided_regex "
    "guided_choice guided_grammar guided_decoding structured_outputs lora_name truncate_prompt_tokens "
    "spaces_between_special_tokens detokenize".split()
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` makes the sample
    reproducible whatever else is in the batch. Raises `InvalidArgument` for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _converted(item, getattr(self, item.name)))

        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                value = repr(getattr(self, name))
                raise InvalidArgument(f"'{name}' is {value[:80]}; allowed: {allowed}")

        require(1 <= self.n <= MAX_N, "n", f"1 to {MAX_N}")
        require(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "0 to 100")
        require(0 < self.top_p <= 1, "top_p", "above 0 and up to 1")
        require(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off), or 1 and more")
        require(0 <= self.min_p <= 1, "min_p", "0 to 1")
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "an integer of 64 bits")
        require(all(self.stop), "stop", "strings that are not empty")
        require(
            len(self.stop) <= MAX_STOP_STRINGS and sum(map(len, self.stop)) <= MAX_STOP_CHARS,
            "stop",
            f"at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters together",
        )
        require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}"
        )
        require(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", "token ids, 0 and more")
        require(1 <= self.max_tokens < 2**31, "max_tokens", "1 and more")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"0 to max_tokens ({self.max_tokens})")
        require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"0 to {MAX_LOGPROBS}"
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From untyped JSON. Numbers and booleans may come as strings, as clients of Triton send them.

        Raises `InvalidArgument` that names an unknown key (and the nearest known one) or a bad value.
        """
        for name in values:
            if name not in _NAMES:
                raise InvalidArgument(_unknown(name))
        return cls(**{name: value for name, value in values.items() if value is not None})


def _unknown(name: str) -> str:
    shown = repr(name[:80])
    if name in _UNSUPPORTED:
        return f"sampling parameter {shown} is not supported by this version"
    near = get_close_matches(name, _NAMES, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(sorted(_NAMES))}"
    return f"unknown sampling parameter {shown}{hint}"


def _converted(item: Field[Any], value: Any) -> Any:
    if value is None and item.default is None:
        return None
    convert = _BY_TYPE[item.type]
    try:
        return convert(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InvalidArgument(f"'{item.name}' is {repr(value)[:80]}; expected {_EXPECTED[convert]}") from None


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if (isinstance(value, float) and not value.is_integer()) or (isinstance(value, str) and "_" in value):
        raise ValueError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}[value.strip().lower()]
    if value in (0, 1):
        return bool(value)
    raise TypeError


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        raise TypeError
    values = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(v, str) for v in values):
        raise TypeError
    return values


def _ints(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, Mapping)):
        raise TypeError
    return tuple(_int(v) for v in value)


_EXPECTED: dict[Callable[[Any], Any], str] = {
    _int: "an integer",
    _float: "a number",
    _bool: "true or false",
    _strings: "a string or a list of strings",
    _ints: "a list of integers",
}
_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    int: _int,
    int | None: _int,
    float: _float,
    bool: _bool,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _ints,
}
_NAMES = frozenset(f.name for f in fields(SamplingParams))

# Every name that is a sampling parameter somewhere, whether this version has code for it or not.
SAMPLING_NAMES = _UNSUPPORTED.union(_NAMES)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenised, and how to continue it. A lower `priority` is served first (as in vLLM)."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cumulative_logprob: bool = False  # wanted even if `params.logprobs` is None
    cache_salt: str | None = None  # prefixes are shared only between equal salts


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of one sequence of a request. `token_ids` are exactly the tokens whose text `text` carries.

    `cumulative_logprob` is the running total over all tokens delivered so far, not a delta.
    `request_finished` is true on the last delta of a request and on no other; an `error` is always last.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[Logprob, ...], ...] = ()  # a tuple for each token: the sampled one first
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    error: OctavoError | None = None
    request_finished: bool = False


# Where a request's deltas go. Called on the engine's thread: it must neither block nor raise.
Sink = Callable[[TextDelta], None]
