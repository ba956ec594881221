"""What can go wrong, as OpenAI's API says it: a status and `{"error": {message, type, param, code}}`.

`of` turns the client's exceptions into that. Used by all modules here.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from starlette.responses import Response

from octavo_client import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    InvalidArgument,
    NotFound,
    OctavoError,
    PermissionDenied,
    ProtocolError,
    ServerUnreachable,
    TimedOut,
    Unavailable,
    Unsupported,
)

CLIENT_GONE = 499  # nobody reads it: for logs
_RETRY_AFTER_S = "1"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# The first that fits counts. Those of 500 and more, 408 and 429 are sent again by OpenAI's clients.
_STATUS: tuple[tuple[type[OctavoError], int], ...] = (
    (InvalidArgument, 400),
    (Unsupported, 400),  # not 501, which OpenAI's clients would send again in vain
    (PermissionDenied, 403),
    (NotFound, 404),
    (AlreadyExists, 409),
    (Cancelled, CLIENT_GONE),
    (TimedOut, 504),
    (ConnectionLost, 502),
    (ProtocolError, 502),
    (ServerUnreachable, 503),
    (Unavailable, 503),
)
_QUOTED = re.compile(r"'(\w+)'")


class ApiError(Exception):
    """An answer that is an error. `param` names the field that is at fault, `code` the kind for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            json.dumps(self.body), self.status, headers=self.headers, media_type="application/json"
        )


class ClientGone(Exception):
    """Whoever asked has closed the connection; what ran for it is cancelled."""


def of(error: OctavoError, fields: Collection[str] = ()) -> ApiError:
    """`fields`: names that the request has; the first one that the message quotes is its `param`."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    code = error.code.lower()
    if isinstance(error, NotFound) and "model" in error.message:
        code = "model_not_found"
    headers = {}
    if isinstance(error, Unavailable) and "max_queue_size" in error.message:
        # The server is well, and so is no reason for a proxy to take it out, as it might after a 503.
        status, code = 429, "queue_full"
    if status in (429, 503):
        headers["Retry-After"] = _RETRY_AFTER_S
    quoted = _QUOTED.findall(error.message) if status == 400 else ()
    param = next((name for name in quoted if name in fields), None)
    return ApiError(status, error.message, param=param, code=code, headers=headers)
