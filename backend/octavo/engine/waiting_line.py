"""The order of the waiting line: by rank, or by turns of tenants. Owned by `Admission`, torch-free."""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from octavo.engine.sequence import Sequence

_rank = attrgetter("rank")

# Of whom a number is kept while they do not wait. Beyond it those who were served least are forgotten, who
# lose least by it.
MAX_IDLE_TENANTS = 10_000


class WaitingLine(Protocol):
    def __len__(self) -> int: ...
    def add(self, seq: Sequence) -> None: ...
    def remove(self, dropped: Callable[[Sequence], bool]) -> None: ...

    def head(self) -> Sequence | None:
        """Who is next."""

    def take(self) -> Sequence:
        """The head, removed. There must be one."""

    def put_back(self, seq: Sequence) -> None:
        """One that was taken and has had nothing: it stands where it would if it had not been taken."""


class RankedLine:
    """In order of `Sequence.rank`, whatever that goes by."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=_rank)

    def remove(self, dropped: Callable[[Sequence], bool]) -> None:
        self._waiting = [seq for seq in self._waiting if not dropped(seq)]

    def head(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    def take(self) -> Sequence:
        return self._waiting.pop(0)

    def put_back(self, seq: Sequence) -> None:
        self.add(seq)


class FairLine:
    """The tenant that was served the fewest tokens is next, with its first in rank: a rank orders the
    requests of one tenant, and lets none of them past another tenant's.

    `charge` says what was computed for whom. A tenant that comes (back) starts level with the one whose turn
    it was last, so that nobody saves up for a burst while idle: start-time fair queueing (Goyal et al.,
    SIGCOMM 1996) with tokens for bytes. Requests without a tenant share one.
    """

    def __init__(self) -> None:
        self._lines: dict[str, RankedLine] = {}  # of the tenants that wait; none is empty
        self._served: dict[str, float] = {}  # tokens, by tenant
        # Where whoever comes starts: what the one whose turn it was last had been served by then, or what a
        # share of all that was computed comes to.
        self._level = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, seq: Sequence) -> None:
        tenant = _tenant(seq)
        if tenant not in self._lines:
            self._served[tenant] = max(self._served.get(tenant, 0), self._level)
        self.put_back(seq)

    def remove(self, dropped: Callable[[Sequence], bool]) -> None:
        for line in self._lines.values():
            line.remove(dropped)
        self._lines = {tenant: line for tenant, line in self._lines.items() if len(line)}

    def head(self) -> Sequence | None:
        return self._lines[self._next()].head() if self._lines else None

    def take(self) -> Sequence:
        tenant = self._next()
        line = self._lines[tenant]
        seq = line.take()
        if not len(line):
            del self._lines[tenant]
        self._level = max(self._level, self._served[tenant])
        return seq

    def put_back(self, seq: Sequence) -> None:
        tenant = _tenant(seq)
        self._served.setdefault(tenant, self._level)
        self._lines.setdefault(tenant, RankedLine()).add(seq)
        if len(self._served) - len(self._lines) > MAX_IDLE_TENANTS:
            self._forget_some()

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """So many tokens of the sequence are being computed."""
        tenant = _tenant(seq)
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens
        # A share of it, so that tenants who come without end do not all go before one that has had something.
        self._level += num_tokens / (1 + len(self._lines))

    def _next(self) -> str:
        def turn(tenant: str) -> tuple[float, int]:
            head = self._lines[tenant].head()
            assert head is not None
            return self._served[tenant], head.arrival

        return min(self._lines, key=turn)

    def _forget_some(self) -> None:
        idle = sorted(self._served.keys() - self._lines.keys(), key=self._served.__getitem__)
        for tenant in idle[: len(idle) // 2]:
            del self._served[tenant]


def _tenant(seq: Sequence) -> str:
    return seq.request.tenant or ""
