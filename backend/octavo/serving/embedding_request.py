"""The JSON of the input `embedding_request`: what to embed, and how.

The shape is that of Triton's vLLM backend, {"input": TEXT or TOKEN IDS, "pooling_params": {...}}; among the
latter `pooling` is Octavo's addition. Pure; used by `codec`.
"""

from collections.abc import Mapping
from typing import Any, get_args

from octavo.errors import InvalidArgument
from octavo.request import Pooling, PoolingParams
from octavo.serving import strict_json
from octavo.values import suggestion

NAME = "embedding_request"
_KEYS = ("input", "pooling_params")
_POOLING_KEYS = ("dimensions", "pooling")


def parse(text: str) -> tuple[str | tuple[int, ...], PoolingParams]:
    """The prompt, and how it becomes a vector. Raises `InvalidArgument` that names what is wrong."""
    values = strict_json.load_object(text, NAME)
    _check_keys(values, NAME, _KEYS)
    if "input" not in values:
        raise InvalidArgument(f"'{NAME}' has no 'input': a text, or a list of token ids")
    pooling_params = values.get("pooling_params")
    if pooling_params is None:
        return _prompt(values["input"]), PoolingParams()
    if not isinstance(pooling_params, dict):
        raise InvalidArgument(f"'pooling_params' is {strict_json.kind(pooling_params)}; expected an object")
    _check_keys(pooling_params, "pooling_params", _POOLING_KEYS)
    pooling = pooling_params.get("pooling", "last")
    if pooling not in get_args(Pooling):
        raise InvalidArgument(f"'pooling' is {repr(pooling)[:80]}; allowed: {', '.join(get_args(Pooling))}")
    return _prompt(values["input"]), PoolingParams(pooling, _dimensions(pooling_params.get("dimensions")))


def _check_keys(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            raise InvalidArgument(f"'{name}' has the unknown key {key[:80]!r}; {suggestion(key, known)}")


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidArgument(f"'input' is {strict_json.kind(value)}; expected a text or a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int:
            raise InvalidArgument(f"'input' holds {repr(token)[:80]} at {position}; expected token ids only")
    return tuple(value)


def _dimensions(value: Any) -> int | None:
    if isinstance(value, list) and len(value) == 1:  # as that backend wants it
        value = value[0]
    if value is None or type(value) is int:
        return value
    raise InvalidArgument(f"'dimensions' is {repr(value)[:80]}; expected an integer")
