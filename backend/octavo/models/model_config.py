"""What a model is: one frozen, checked `ModelConfig`, made from a Hugging Face style `config.json`.

The engine makes it from `Checkpoint.config()` before anything of the model's size is allocated; layers,
model runner and KV cache take every size from it. Torch-free. Whatever this version has no code for is
refused here with a `ConfigError` that names the key, its value and what is supported, so that no model
is ever served slightly wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]

_ARCHITECTURES = ("LlamaForCausalLM",)
_DTYPES = ("float32", "bfloat16", "float16")

# Limits on what a file may claim: far above every model, and low enough that a mistake is seen here. The
# loader compares the sizes with the tensors that are there, so that none is allocated on a claim alone.
_MAX_WIDTH = 2**20
_MAX_LAYERS = 2**10
_MAX_VOCAB = 2**22
_MAX_POSITIONS = 2**24


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles: `inv_freq[i] = theta ** (-2 i / head_size)`, then changed by `kind`.

    - default   nothing is changed
    - linear    every frequency is divided by `factor`
    - llama3    low frequencies are divided by `factor`, high ones kept, those between interpolated by
                `low_freq_factor`, `high_freq_factor` and `original_max_positions` (Llama 3.1)
    - yarn      interpolated between `beta_fast` and `beta_slow` rotations over `original_max_positions`
                (YaRN, arXiv 2309.00071), rounded to whole dimensions when `truncate`; cosine and sine are
                multiplied by `attention_factor`
    - factors   `inv_freq[i]` is divided by `frequency_factors[i]`: llama3 as GGUF files store it

    `attention_factor` is already resolved (YaRN's default is a function of `factor`); 1.0 elsewhere.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0  # tokens; 0 where `kind` has no use for it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()  # [head_size / 2]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model. `head_size` need not be `hidden_size / num_heads`."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int  # tokens, prompt and output together
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str  # of the weights as published: float32, bfloat16 or float16

    @classmethod
    def from_dict(cls, hf_config: Mapping[str, Any]) -> "ModelConfig":
        """From the content of a `config.json`. Raises `ConfigError` for what is wrong or not supported."""
        read = _Reader(hf_config)
        architecture = _architecture(hf_config)
        _refuse_unsupported(hf_config)
        hidden_size = read.integer("hidden_size", _MAX_WIDTH)
        num_heads = read.integer("num_attention_heads", _MAX_WIDTH)
        num_kv_heads = read.integer("num_key_value_heads", _MAX_WIDTH, default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config key 'num_key_value_heads' is {num_kv_heads}; it must divide num_attention_heads, "
                f"{num_heads}"
            )
        if hf_config.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"config key 'hidden_size' is {hidden_size}; without 'head_dim' it must be a multiple of "
                f"num_attention_heads, {num_heads}"
            )
        head_size = read.integer("head_dim", _MAX_WIDTH, default=hidden_size // num_heads)
        if head_size % 2:
            raise ConfigError(f"the head size is {head_size}; rotary embeddings need an even one")
        max_positions = read.integer("max_position_embeddings", _MAX_POSITIONS, default=2048)
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=read.integer("num_hidden_layers", _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            intermediate_size=read.integer("intermediate_size", _MAX_WIDTH),
            vocab_size=read.integer("vocab_size", _MAX_VOCAB),
            max_positions=max_positions,
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
            rope=_rope(hf_config, head_size, max_positions),
            tie_embeddings=read.boolean("tie_word_embeddings"),
            attention_bias=read.boolean("attention_bias"),
            mlp_bias=read.boolean("mlp_bias"),
            eos_token_ids=_token_ids(hf_config),
            bos_token_id=read.token_id("bos_token_id"),
            torch_dtype=_dtype(hf_config),
        )


class _Reader:
    """Typed access to a mapping from a file. Every complaint names the key, its value, what is allowed."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def error(self, key: str, allowed: str) -> ConfigError:
        value = repr(self._values.get(key))[:80]
        return ConfigError(f"config key '{self._where}{key}' is {value}; it must be {allowed}")

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(key, f"an integer from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None, *, at_least: float = 0.0) -> float:
        value: Any = self._values.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0 or value < at_least:
            raise self.error(key, f"a number of {at_least:g} and more" if at_least else "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def token_id(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < _MAX_VOCAB):
            raise self.error(key, "a token id or null")
        return value


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list | tuple) and len(names) == 1 and names[0] in _ARCHITECTURES:
        return str(names[0])
    raise ConfigError(
        f"config key 'architectures' is {repr(names)[:80]}; supported: {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Switches that change the computation, with the values under which it is the one we have."""
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "sliding_window": (None,),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
        "num_local_experts": (0, None),
        "is_encoder_decoder": (False, None),
    }
    for key, values in supported.items():
        if config.get(key) not in values:
            raise ConfigError(
                f"config key '{key}' is {repr(config[key])[:80]}, which this version does not support; "
                f"supported: {values[0]!r}"
            )


def _token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < _MAX_VOCAB for i in ids):
        raise ConfigError(
            f"config key 'eos_token_id' is {repr(value)[:80]}; it must be a token id, a list of them or null"
        )
    return tuple(dict.fromkeys(ids))


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ConfigError(f"config key 'torch_dtype' is {repr(name)[:80]}; supported: {', '.join(_DTYPES)}")
    return str(name)


def _rope(config: Mapping[str, Any], head_size: int, max_positions: int) -> RopeConfig:
    """Both spellings: `rope_parameters` with everything in it, or `rope_theta` beside `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config key '{key}' is {repr(scaling)[:80]}; it must be an object or null")
    theta = _Reader(scaling).number("rope_theta", _Reader(config).number("rope_theta", 10000.0, at_least=2))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in get_args(RopeKind):
        raise ConfigError(
            f"config key '{key}.rope_type' is {repr(kind)[:80]}; supported: {', '.join(get_args(RopeKind))}"
        )
    if scaling.get("partial_rotary_factor") not in (1.0, None):
        raise ConfigError(
            f"config key '{key}.partial_rotary_factor' is {repr(scaling['partial_rotary_factor'])[:80]}; "
            "supported: 1.0"
        )
    read = _Reader(scaling, where=f"{key}.")
    if kind == "linear":
        return RopeConfig(theta, kind, factor=read.number("factor", at_least=1.0))
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if low >= high:
            raise read.error("low_freq_factor", f"below high_freq_factor, {high:g}")
        return RopeConfig(
            theta,
            kind,
            factor=read.number("factor", at_least=1.0),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=read.integer("original_max_position_embeddings", _MAX_POSITIONS),
        )
    if kind == "yarn":
        return _yarn(scaling, read, theta, max_positions)
    if kind == "factors":
        factors = scaling.get("frequency_factors")
        if (
            not isinstance(factors, list | tuple)
            or len(factors) != head_size // 2
            or not all(type(f) is float and math.isfinite(f) and f > 0 for f in factors)
        ):
            raise read.error("frequency_factors", f"{head_size // 2} numbers above 0, half the head size")
        return RopeConfig(theta, kind, frequency_factors=tuple(factors))
    return RopeConfig(theta)


def _yarn(scaling: Mapping[str, Any], read: _Reader, theta: float, max_positions: int) -> RopeConfig:
    original = read.integer("original_max_position_embeddings", _MAX_POSITIONS, default=max_positions)
    factor = read.number("factor", default=max_positions / original, at_least=1.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        attention_factor = read.number("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = mscale(read.number("mscale")) / mscale(read.number("mscale_all_dim"))
    else:
        attention_factor = mscale(1.0)
    beta_fast, beta_slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    if beta_slow > beta_fast:
        raise read.error("beta_slow", f"at most beta_fast, {beta_fast:g}")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=read.boolean("truncate", default=True),
        attention_factor=attention_factor,
    )
