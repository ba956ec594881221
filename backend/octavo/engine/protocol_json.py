"""What stands in `protocol.py` as JSON and back, by the types of its fields: a new field needs no word here.

Used by `recording.py`. Torch-free.
"""

import functools
import json
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_json(value: Any) -> str:
    """One line. A dataclass becomes an object; a tuple becomes a list, a named one too."""
    return json.dumps(value, default=_fields_of, separators=(",", ":"))


def from_json(kind: Any, value: Any) -> Any:
    """An object of a type that stands in `protocol.py`, of what JSON has left of it. What an older version
    did not write is at its default. Raises `TypeError`, `KeyError`, `ValueError` or `AttributeError` for what
    is none."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):  # of one thing and None
        return from_json(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if inner[-1] is Ellipsis:
            return tuple([from_json(inner[0], item) for item in value])
        return tuple(from_json(each, item) for each, item in zip(inner, value, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_json(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):  # a named one, in the order of its fields
        return kind(
            *[from_json(each, item) for each, item in zip(_hints(kind).values(), value, strict=False)]
        )
    return value


def _fields_of(value: Any) -> dict[str, Any]:
    """A dataclass without what is at its default. Tuples, named ones too, are lists in JSON by themselves."""
    given = ((item, getattr(value, item.name)) for item in fields(value))
    return {item.name: got for item, got in given if item.default is MISSING or got != item.default}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
