"""How many requests wait for their first step, and how many may: the bound on what piles up in a server."""

import threading

from octavo.errors import Unavailable


class WaitingRoom:
    """A request is inside from its arrival to its first step or its end, so being tokenised counts: a burst
    that arrives faster than it is tokenised is seen as what it is. Any thread may call any of these."""

    def __init__(self, max_queue_size: int | None) -> None:
        """None: as many as come."""
        self._size = max_queue_size
        self._inside: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, request_id: str) -> None:
        """Raises `Unavailable` when the room is full; then the request is not inside."""
        with self._lock:
            if self._size is not None and len(self._inside) >= self._size:
                raise Unavailable(
                    f"{len(self._inside)} requests wait for their first step already, and max_queue_size is "
                    f"{self._size}; send the request again later, or to another server"
                )
            self._inside.add(request_id)

    def leave(self, request_id: str) -> None:
        """Fine for one that has left already, or never was inside."""
        with self._lock:
            self._inside.discard(request_id)
