"""What a request brings beside its tensors: Octavo's own parameters, time limits, and what is not ours.

They come as one JSON object: over gRPC a request's parameters, over HTTP what /generate does not take for an
input. Pure; used by `codec`, and by `tritonserver` for the time limit.
"""

from collections.abc import Callable
from typing import Any

from octavo.errors import InvalidArgument
from octavo.serving import strict_json

NAME = "request parameters"
MAX_NAME_CHARS = 4 << 10

# Triton's own protocols and clients put these there.
_RESERVED = frozenset(
    "id priority timeout sequence_id sequence_start sequence_end headers binary_data_size binary_data_output "
    "binary_data shared_memory_region shared_memory_byte_size shared_memory_offset classification".split()
)
_RESERVED_PREFIX = "triton_"
_DEADLINE = "octavo_deadline_ms"


def time_limit_s(parameters: str = "", timeout_us: int = 0) -> float | None:
    """How long a request may take from its arrival, or None: the least of Triton's own timeout, in
    microseconds where 0 is none, of the request parameter `timeout`, which is the same over HTTP, and of
    `octavo_deadline_ms`.

    Apart from `split`, since the time until a request is parsed counts too. Raises `InvalidArgument`.
    """
    limits = [timeout_us / 1e6]
    if '"timeout"' in parameters or f'"{_DEADLINE}"' in parameters:
        values = strict_json.load_object(parameters, NAME)
        timeout, deadline = values.get("timeout", 0), values.get(_DEADLINE, 0)
        limits.append(_integer("timeout", timeout, 0, 2**63, "microseconds, 0 for no limit") / 1e6)
        limits.append(_integer(_DEADLINE, deadline, 0, 2**63, "milliseconds, 0 for no limit") / 1e3)
    return min((limit for limit in limits if limit), default=None)


def split(parameters: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Octavo calls its own (by field of `codec.Generate`), and all else that is not reserved: sampling
    parameters, if anything. Raises `InvalidArgument`."""
    values = strict_json.load_object(parameters, NAME) if parameters else {}
    own: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in values.items():
        if name in _OWN:
            field, convert = _OWN[name]
            own[field] = convert(name, value)
        elif name == _DEADLINE:  # see `time_limit_s`
            pass
        elif name.startswith("octavo_"):
            known = ", ".join((*_OWN, _DEADLINE))
            raise InvalidArgument(f"unknown request parameter {name[:80]!r}; known: {known}")
        elif name not in _RESERVED and not name.startswith(_RESERVED_PREFIX):
            rest[name] = value
    return own, rest


def _integer(name: str, value: Any, least: int, most: int, expected: str) -> int:
    """At least `least`, and below `most`."""
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool) and least <= int(value) < most:
            return int(value)
    except ValueError:
        pass
    raise InvalidArgument(f"'{name}' is {repr(value)[:80]}; expected {expected}")


def _priority(name: str, value: Any) -> int:
    return _integer(name, value, -(2**31), 2**31, "an integer of 32 bits, the lower the sooner")


def _name(name: str, value: Any) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARS:
        return value
    # Its text is not repeated: a salt is a secret.
    what = f"it has {len(value)}" if isinstance(value, str) else f"it is {strict_json.kind(value)}"
    raise InvalidArgument(f"'{name}' must be a string of 1 to {MAX_NAME_CHARS} characters; {what}")


def _trace_header(name: str, value: Any) -> str:
    """Of W3C's trace context, which says to ignore what is malformed: no request fails for that."""
    return value if isinstance(value, str) else ""


_OWN: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "octavo_priority": ("priority", _priority),
    "cache_salt": ("cache_salt", _name),
    "tenant": ("tenant", _name),
    "traceparent": ("traceparent", _trace_header),
    "tracestate": ("tracestate", _trace_header),
}
