"""The exceptions that Octavo raises on purpose.

    OctavoError                 INTERNAL      anything below; catch this one
    |- InvalidArgument          INVALID_ARG   the request is wrong; the text says what is allowed
    |  `- PromptTooLong         INVALID_ARG   it can never fit, however long one waits
    |- ConfigError              INVALID_ARG   a key or value of the engine configuration is wrong
    |- NotFound                 NOT_FOUND     a named thing (an adapter, a request) is not here
    |- Unavailable              UNAVAILABLE   right, but not now: shutting down, or too many wait already
    |  `- DeadlineExceeded      UNAVAILABLE   its time was up first; the code is what Triton gives timeouts
    |- Cancelled                CANCELLED     the client went away or asked for it
    |- WeightsError             INTERNAL      a model file cannot be read; names file, tensor and reason
    |- RecordingError           INTERNAL      a file is no recording of steps, or not one of this version
    |- LaunchError              UNAVAILABLE   the server cannot be started; says what to do about it
    `- StepFailed               INTERNAL      a model step failed; only the requests in it are lost

Codes are Triton's. They do not reach every client of Triton, so the text on the wire begins with the
code in brackets: `error.wire` is that text.
"""

from typing import ClassVar


class OctavoError(Exception):
    """Base class. `str(error)` is for people; `error.wire` is for the wire."""

    code: ClassVar[str] = "INTERNAL"

    @property
    def wire(self) -> str:
        return f"[{self.code}] {self}"


class InvalidArgument(OctavoError):
    code = "INVALID_ARG"


class PromptTooLong(InvalidArgument):
    pass


class ConfigError(OctavoError):
    code = "INVALID_ARG"

    def __init__(self, message: str, key: str | None = None) -> None:
        """`key`: the one argument that is at fault, if the message is about one."""
        super().__init__(message)
        self.key = key


class NotFound(OctavoError):
    code = "NOT_FOUND"


class Unavailable(OctavoError):
    code = "UNAVAILABLE"


class DeadlineExceeded(Unavailable):
    pass


class Cancelled(OctavoError):
    code = "CANCELLED"


class WeightsError(OctavoError):
    pass


class RecordingError(OctavoError):
    pass


class LaunchError(OctavoError):
    code = "UNAVAILABLE"


class StepFailed(OctavoError):
    pass
