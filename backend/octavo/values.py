"""Untyped values, of JSON or of Python callers, to typed ones. Used by `request`, on any thread; and what to
say of a name that nobody knows, for all who check names.

Clients of Triton send numbers and booleans as strings, which are taken. A converter raises `ValueError`,
`TypeError`, `KeyError` or `OverflowError` for a value that is none of its kind.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field
from difflib import get_close_matches
from typing import Any

from octavo.errors import InvalidArgument

UNREADABLE = (ValueError, TypeError, KeyError, OverflowError)


def suggestion(name: str, known: Collection[str]) -> str:
    """What somebody who wrote an unknown name may have meant: the nearest of the known ones, else all."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"


def field_value(item: Field[Any], value: Any) -> Any:
    """For a field of a dataclass, by its type. Raises `InvalidArgument` that names it and what it takes."""
    if value is None and item.default is None:
        return None
    convert = _BY_TYPE[item.type]
    try:
        return convert(value)
    except UNREADABLE:
        raise InvalidArgument(f"'{item.name}' is {repr(value)[:80]}; expected {_EXPECTED[convert]}") from None


def as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if (isinstance(value, float) and not value.is_integer()) or (isinstance(value, str) and "_" in value):
        raise ValueError
    return int(value)


def as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def as_bool(value: Any) -> bool:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}[value.strip().lower()]
    if value in (0, 1):
        return bool(value)
    raise TypeError


def as_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        raise TypeError
    values = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(v, str) for v in values):
        raise TypeError
    return values


def as_ints(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, Mapping)):
        raise TypeError
    return tuple(as_int(v) for v in value)


def as_biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    biases = {as_int(token): as_float(bias) for token, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError
    return biases


_EXPECTED: dict[Callable[[Any], Any], str] = {
    as_int: "an integer",
    as_float: "a number",
    as_bool: "true or false",
    as_strings: "a string or a list of strings",
    as_ints: "a list of integers",
    as_biases: "an object of token ids, each once, with their biases",
}
_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    int: as_int,
    int | None: as_int,
    float: as_float,
    bool: as_bool,
    tuple[str, ...]: as_strings,
    tuple[int, ...]: as_ints,
    tuple[int, ...] | None: as_ints,
    Mapping[int, float]: as_biases,
}
