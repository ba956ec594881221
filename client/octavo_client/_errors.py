"""The exceptions of the client, and how they are told from what a server says.

    OctavoError              UNKNOWN            anything below; catch this one
    |- InvalidArgument       INVALID_ARG        the request is wrong; the text says what is allowed
    |- NotFound              NOT_FOUND          no such model, version, adapter or open request
    |- AlreadyExists         ALREADY_EXISTS
    |- Unavailable           UNAVAILABLE        right, but not now: the queue is full, the model is loading
    |  |- ServerUnreachable  UNAVAILABLE        no connection could be made: nothing was sent
    |  |- ConnectionLost     UNAVAILABLE        it broke before the answer's end; the request may have run
    |  `- TimedOut           UNAVAILABLE        `timeout_s` was up first
    |- Cancelled             CANCELLED          somebody cancelled it by its id
    |- Unsupported           UNSUPPORTED        this server has no such thing
    |  `- NoAdapters         UNSUPPORTED        it loads and unloads no adapters
    |- PermissionDenied      PERMISSION_DENIED  a proxy, or a restricted protocol, wants a header
    |- InternalError         INTERNAL           the server failed at it
    `- ProtocolError         INTERNAL           the answer is none of this contract's

Codes are Triton's, but for PERMISSION_DENIED. Triton does not pass them on to every client, so the server
begins every text with its code in brackets; Triton's own texts, which have none, go by the status they came
with and by what they say.
"""

import re
from typing import ClassVar


class OctavoError(Exception):
    """Base class. `str(error)` is for people and has no code in it.

    `retryable` says whether the same request may be sent again as long as no token of its answer has come.
    """

    code: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id  # of the request that failed, where there is one


class InvalidArgument(OctavoError):
    code = "INVALID_ARG"


class NotFound(OctavoError):
    code = "NOT_FOUND"


class AlreadyExists(OctavoError):
    code = "ALREADY_EXISTS"


class Unavailable(OctavoError):
    code = "UNAVAILABLE"
    retryable = True


class ServerUnreachable(Unavailable):
    pass


class ConnectionLost(Unavailable):
    retryable = False  # if it was this request that killed the server, it would kill the next one


class TimedOut(Unavailable):
    retryable = False


class Cancelled(OctavoError):
    code = "CANCELLED"


class Unsupported(OctavoError):
    code = "UNSUPPORTED"


class NoAdapters(Unsupported):
    pass


class PermissionDenied(OctavoError):
    code = "PERMISSION_DENIED"


class InternalError(OctavoError):
    code = "INTERNAL"


class ProtocolError(OctavoError):
    code = "INTERNAL"


_CODE = re.compile(r"\s*\[([A-Z_]+)\] ?(.*)", re.DOTALL)
_BY_CODE: dict[str, type[OctavoError]] = {
    error.code: error
    for error in (
        OctavoError,
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Unavailable,
        Cancelled,
        Unsupported,
        InternalError,
    )
}

# What Triton says itself, without a code. The first that occurs counts.
_IN_TRITONS_WORDS: tuple[tuple[str, type[OctavoError]], ...] = (
    ("has no available versions", Unavailable),  # it is being loaded, or was unloaded
    ("not ready", Unavailable),
    ("stopped accepting new inference requests", Unavailable),
    ("Server is stopping", Unavailable),
    ("Request for unknown model", NotFound),
    ("is restricted", PermissionDenied),
    ("unexpected inference input", InvalidArgument),
    ("doesn't support models with decoupled transaction policy", Unsupported),
)
_BY_STATUS: dict[int, type[OctavoError]] = {
    400: InvalidArgument,
    401: PermissionDenied,
    403: PermissionDenied,
    404: NotFound,
    409: AlreadyExists,
    413: InvalidArgument,
    429: Unavailable,
    499: Cancelled,
    501: Unsupported,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def from_message(message: str, otherwise: type[OctavoError] = OctavoError) -> OctavoError:
    """The error that a server's text stands for; `otherwise` where the text does not say."""
    match = _CODE.match(message)
    if match and match[1] in _BY_CODE:
        return _BY_CODE[match[1]](match[2])
    for words, kind in _IN_TRITONS_WORDS:
        if words in message:
            return kind(message)
    return otherwise(message)


def from_status(status: int, message: str) -> OctavoError:
    """For an HTTP status of 400 or more, with the text that came with it."""
    return from_message(message or f"HTTP status {status}", _BY_STATUS.get(status, InternalError))
