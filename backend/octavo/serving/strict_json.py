"""JSON from strangers: what Python's parser lets through and JSON does not know is an error with a name.

Used for tensors that hold JSON, for request parameters and for `model.json`.
"""

import json
from typing import Any, NoReturn

from octavo.errors import InvalidArgument

# More than any request needs, and few enough for whoever walks a value by recursion, such as `repr`.
MAX_DEPTH = 64

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def load(text: str, name: str) -> Any:
    """The value. Raises `InvalidArgument` that calls the text `name`: for bad syntax, NaN and the
    infinities, a key that stands twice, half a surrogate pair, nesting deeper than `MAX_DEPTH`."""

    def refuse(literal: str) -> NoReturn:
        raise InvalidArgument(f"'{name}' holds {literal}, which is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InvalidArgument(f"'{name}' has the key {key[:80]!r} twice")
            values[key] = value
        return values

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        if "\\u" in text:  # an escape is the only way in for half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        what = f"nested too deeply; allowed: {MAX_DEPTH} levels"
        raise InvalidArgument(f"'{name}' is JSON that is {what}") from None
    except UnicodeEncodeError:
        raise InvalidArgument(f"'{name}' holds half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise InvalidArgument(f"'{name}' is not valid JSON: {error}") from None
    return value


def load_object(text: str, name: str) -> dict[str, Any]:
    """Like `load`, for what must be an object."""
    value = load(text, name)
    if not isinstance(value, dict):
        raise InvalidArgument(f"'{name}' is JSON of {kind(value)}; expected an object")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether there are more than `depth` objects and lists in each other, the value included."""
    level = [value]
    for _ in range(depth + 1):
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def kind(value: Any) -> str:
    """What a JSON value is, for an error text."""
    return _KINDS.get(type(value), "a number")
