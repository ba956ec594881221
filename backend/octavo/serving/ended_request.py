"""A request after its final response: what metrics, the request log and spans have to tell of it.

Made by the sender thread, which does not touch the request any more then; any thread may read it.
"""

from dataclasses import dataclass

from octavo.errors import OctavoError
from octavo.request import RequestStats
from octavo.serving.outbox import OpenRequest


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """`error` is None for one that had a result; `ended_s` is when its final response was sent, by
    `time.monotonic()`, like all times here."""

    request: OpenRequest
    error: OctavoError | None
    ended_s: float

    @property
    def is_control(self) -> bool:
        """Whether it wanted something of the server, not of the engine: to cancel another one."""
        return self.error is None and not self.request.handed_over

    @property
    def latency_s(self) -> float:
        """From its arrival to its final response."""
        return self.ended_s - self.request.arrived_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """From its arrival until its first token was sent, or kept for its one response; None without any."""
        first_s = self.request.first_token_s
        return None if first_s is None else first_s - self.request.arrived_s

    @property
    def time_per_token_s(self) -> float | None:
        """Mean over a sequence's tokens after its first; None of one token."""
        request = self.request
        if request.reply is None or request.first_token_s is None or request.last_token_s is None:
            return None
        steps = request.num_tokens / request.reply.num_sequences - 1
        return (request.last_token_s - request.first_token_s) / steps if steps > 0 else None

    @property
    def stats(self) -> RequestStats | None:
        """The engine's account of its time; None where it has none: of what failed."""
        return self.request.reply.stats if self.request.reply else None

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of each sequence that has one."""
        return self.request.reply.finish_reasons if self.request.reply else ()

    @property
    def num_prompt_tokens(self) -> int | None:
        """None where the engine never said."""
        return (self.request.reply.num_prompt_tokens or None) if self.request.reply else None
