"""What a caller asks for and what comes back, free of any transport.

`SamplingParams.parse` is the one place where names and ranges of sampling parameters are checked.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from octavo.errors import InvalidArgument, NotFound, OctavoError
from octavo.values import UNREADABLE, as_bool, field_value, suggestion

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all together
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 64 << 10  # of all together

# Names of vLLM's that this version has no code for; they are refused by name rather than ignored, except
# where their value asks for nothing: null, or that of `_NEUTRAL`.
_UNSUPPORTED = frozenset(
    "guided_json guided_regex guided_choice guided_grammar guided_decoding guided_decoding_backend "
    "guided_whitespace_pattern structured_outputs lora_name truncate_prompt_tokens "
    "spaces_between_special_tokens detokenize".split()
)

# What a beam search goes by. It does not sample, and knows the model's own distribution only; a seed and the
# temperatures that say nothing are let through, since clients send them with everything.
_WITH_BEAM_SEARCH = frozenset(
    "use_beam_search beam_width length_penalty early_stopping n best_of temperature top_k seed "
    "stop_token_ids include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs "
    "skip_special_tokens".split()
)

# What has no meaning without one, and the values that ask for nothing.
_OF_BEAM_SEARCH_ONLY: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (None, 1),
    "length_penalty": (1,),
    "early_stopping": (False,),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` makes the sample
    reproducible whatever else is in the batch. Raises `InvalidArgument` for a value out of range.

    Of `best_of` sequences, the `n` with the highest cumulative log-probability are answered. Logits go
    through `logit_bias` (by token id), then `repetition_penalty` (CTRL, arXiv 1909.05858; over prompt and
    output), then `frequency_penalty` and `presence_penalty` (OpenAI's; over the output), then
    `allowed_token_ids` and `bad_words`, which are not generated: a word that begins in the prompt is none.
    `logprobs` and `prompt_logprobs` are of the distribution before all that.

    With `use_beam_search` the model's own distribution is searched and nothing is sampled: `temperature` must
    be 0 or 1, which are the same here, and whatever else would change or draw from it must be off. There are
    `beam_width` beams, by default `best_of` or `n`. A continuation that ended scores its summed
    log-probability over its length to the power of `length_penalty`; the best `n` are answered, best first.
    With `early_stopping` the search is over when `beam_width` of them have ended, without it when those still
    going could not do better as they are. `stop` strings cannot be searched for.
    """

    n: int = 1
    best_of: int | None = None
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
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, field_value(item, getattr(self, item.name)))

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
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"0 to {MAX_LOGPROBS}")
        require(
            self.best_of is None or self.n <= self.best_of <= MAX_N, "best_of", f"n ({self.n}) to {MAX_N}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(abs(getattr(self, name)) <= MAX_PENALTY, name, f"{-MAX_PENALTY} to {MAX_PENALTY}")
        # The bounds keep products of logits finite.
        require(1e-4 <= self.repetition_penalty <= 1e4, "repetition_penalty", "0.0001 to 10000")
        require(len(self.logit_bias) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
        for token, bias in self.logit_bias.items():
            if not (0 <= token < 2**31 and abs(bias) <= MAX_LOGIT_BIAS):
                raise InvalidArgument(
                    f"'logit_bias' of token {repr(token)[:20]} is {bias}; allowed: token ids, 0 and more, "
                    f"each with {-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
                )
        allowed = self.allowed_token_ids
        require(
            allowed is None or (len(allowed) > 0 and all(0 <= t < 2**31 for t in allowed)),
            "allowed_token_ids",
            "at least one token id, 0 and more",
        )
        require(all(self.bad_words), "bad_words", "strings that are not empty")
        require(
            len(self.bad_words) <= MAX_BAD_WORDS and sum(map(len, self.bad_words)) <= MAX_BAD_WORD_CHARS,
            "bad_words",
            f"at most {MAX_BAD_WORDS} strings of {MAX_BAD_WORD_CHARS} characters together",
        )
        require(self.beam_width is None or 1 <= self.beam_width <= MAX_N, "beam_width", f"1 to {MAX_N}")
        # The bound keeps powers of lengths finite.
        require(abs(self.length_penalty) <= 10, "length_penalty", "-10 to 10")
        _check_beam_search(self)

    @property
    def num_sequences(self) -> int:
        """How many are generated; `n` of them are answered."""
        return (self.beam_width if self.use_beam_search else None) or self.best_of or self.n

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From untyped JSON. Numbers and booleans may come as strings, as clients of Triton send them.

        Raises `InvalidArgument` that names an unknown key (and the nearest known one) or a bad value, and
        `NotFound` that names an adapter.
        """
        for name, value in values.items():
            if name not in _NAMES and not _asks_for_nothing(name, value):
                if name == "lora_name":
                    raise NotFound(f"no adapter {repr(value)[:80]} is here: this model is served without any")
                raise InvalidArgument(_unknown(name))
        return cls(**{name: v for name, v in values.items() if name in _NAMES and v is not None})


def _check_beam_search(params: SamplingParams) -> None:
    """Raises `InvalidArgument` where the parameters of a beam search contradict the others."""
    if not params.use_beam_search:
        for name, without in _OF_BEAM_SEARCH_ONLY.items():
            value = getattr(params, name)
            if value not in without:
                raise InvalidArgument(
                    f"'{name}' is {value}, but belongs to a beam search; set 'use_beam_search' to true, or "
                    "leave it out"
                )
        return
    if params.temperature not in (0, 1) or params.top_k > 0:
        raise InvalidArgument(
            f"'temperature' is {params.temperature} and 'top_k' is {params.top_k}; with 'use_beam_search' "
            "nothing is sampled: allowed are 0 or 1 for the first, and 0 or -1 for the second"
        )
    unset = SamplingParams()
    for item in fields(params):
        if item.name not in _WITH_BEAM_SEARCH and getattr(params, item.name) != getattr(unset, item.name):
            value = repr(getattr(params, item.name))[:80]
            raise InvalidArgument(
                f"'{item.name}' cannot be combined with 'use_beam_search': it is {value}; leave it out"
            )
    if params.beam_width is None and params.num_sequences == 1:
        raise InvalidArgument("a beam search needs a width: set 'beam_width', or 'best_of' or 'n' above 1")
    if params.n > params.num_sequences:
        raise InvalidArgument(
            f"'n' is {params.n}, but 'beam_width' is {params.beam_width}; allowed: up to that"
        )
    if params.beam_width is not None and params.best_of not in (None, params.beam_width):
        raise InvalidArgument(
            f"'beam_width' is {params.beam_width}, but 'best_of' is {params.best_of}; give one of them"
        )


def _unknown(name: str) -> str:
    shown = repr(name[:80])
    if name in _UNSUPPORTED:
        return f"sampling parameter {shown} is not supported by this version"
    return f"unknown sampling parameter {shown}; {suggestion(name, _NAMES)}"


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a parameter that this version has no code for is set to what it would be without it."""
    if name not in _UNSUPPORTED or value is None:
        return name in _UNSUPPORTED
    convert, neutral = _NEUTRAL.get(name, (str, None))
    try:
        return bool(convert(value) == neutral)
    except UNREADABLE:
        return False


_NAMES = frozenset(f.name for f in fields(SamplingParams))

# How to read what asks for nothing, and what that is.
_NEUTRAL: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "detokenize": (as_bool, True),
    "spaces_between_special_tokens": (as_bool, True),
    "lora_name": (str, ""),
}

# Every name that is a sampling parameter somewhere, whether this version has code for it or not.
SAMPLING_NAMES = _UNSUPPORTED.union(_NAMES)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a prompt becomes one vector of unit length: from the hidden state of its last token, or from the
    mean over all. `dimensions`: only so many of the first."""

    pooling: Pooling = "last"
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenised, and how to continue it. A lower `priority` is served first (as in vLLM)."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cumulative_logprob: bool = False  # wanted even if `params.logprobs` is None
    cache_salt: str | None = None  # prefixes are shared only between equal salts
    tenant: str | None = None  # whose share of the engine it takes, where shares are fair
    arrived_s: float = field(default_factory=time.monotonic)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the ways to write `params.bad_words` in tokens
    embed: PoolingParams | None = None  # the prompt is to become a vector, not to be continued
    # Content of its blocks that was read from files, by digest: until the scheduler has put it into a plan.
    stored: dict[bytes, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt must be computed, though a cache holds the KV blocks of some."""
        means = self.embed is not None and self.embed.pooling == "mean"
        return means or self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Where a request's time went, and what it was spared. Times add up to that from arrival to the end."""

    queue_s: float  # from its arrival to its first step: tokenising, and waiting in line
    prefill_s: float  # from there to its first token
    decode_s: float  # from there to its last one
    cached_prompt_tokens: int  # found in the prefix cache
    preemptions: int  # times that one of its sequences was thrown out and computed anew
    accepted_draft_tokens: int = 0


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
    # On the first delta of a request that asked: for each prompt token, the first excepted, itself first.
    prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None
    embedding: tuple[float, ...] | None = None  # all that comes of a request that embeds
    stats: RequestStats | None = None  # on the last delta, unless that is an error
    error: OctavoError | None = None
    request_finished: bool = False


# Where a request's deltas go. Called on the engine's thread: it must neither block nor raise.
Sink = Callable[[TextDelta], None]
