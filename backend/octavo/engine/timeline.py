"""Where one request's time goes. Owned by its `Delivery`, on the engine's thread."""

import time
from collections.abc import Callable

from octavo.request import RequestStats


class Timeline:
    """`on_start` is called once, when the request's first step begins. It must neither block nor raise."""

    def __init__(self, arrived_s: float, on_start: Callable[[], None] | None = None) -> None:
        """`arrived_s` is of `time.monotonic()`, as all times here."""
        self._arrived_s = arrived_s
        self._on_start = on_start
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._cached_prompt_tokens = 0
        self._preemptions = 0

    def enter_batch(self, num_computed_tokens: int) -> None:
        """One of the request's sequences begins with so many tokens from the prefix cache: the first of them,
        or one that was thrown out before. Those that fork off another never enter by themselves."""
        if self._started_s is not None:
            self._preemptions += 1
            return
        self._started_s = time.monotonic()
        self._cached_prompt_tokens = num_computed_tokens
        if self._on_start:
            self._on_start()

    def note_token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()

    def stats(self) -> RequestStats:
        """For a request whose last token was just noted."""
        assert self._started_s is not None
        assert self._first_token_s is not None
        return RequestStats(
            queue_s=self._started_s - self._arrived_s,
            prefill_s=self._first_token_s - self._started_s,
            decode_s=time.monotonic() - self._first_token_s,
            cached_prompt_tokens=self._cached_prompt_tokens,
            preemptions=self._preemptions,
        )
