"""What a soak counts while it runs, what it reads of the server while that rests, and the verdict on both.

`Tally` is written to by all the clients' threads; everything else here is plain values, so that the judge
itself can be tested without a server. Used by `soak`.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MOST_GROWTH = 0.05  # of the processes' resident memory, from the end of the warm-up to the end
MOST_TIES = 0.001  # of the answers that are known: two best logits as good as equal (rule 3)
MORE_SERVER_THREADS = 8  # pools of its own come and go with the connections; a model has none
# The server's status when it has waited in vain for a model to go. It does that, with no request in it,
# after a gRPC call was cancelled while its last response was on its way: the 24.10 server keeps such a call.
# That our side has answered everyone is known from what the models say.
GAVE_UP = 1
_MOST_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went, as its client saw it. `finals` counts the final responses that came.

    `code` is "OK", an error's code, or "server" for an error in the server's own words, which begins without
    one. `differs` is None where nobody knows the right text.
    """

    kind: str
    finals: int
    code: str
    text: str = ""  # of the error, or of what else there is to say
    left: bool = False  # the client gave up before the final response
    allowed: frozenset[str] = frozenset({"OK"})
    differs: bool | None = None

    def problem(self) -> str | None:
        if self.finals > 1 or (self.finals == 0 and not self.left):
            return f"{self.kind}: {self.finals} final responses ({self.code} {self.text})"
        if self.finals == 1 and self.code not in self.allowed:
            return f"{self.kind}: {self.code}, expected {', '.join(sorted(self.allowed))}: {self.text}"
        return None


@dataclass(slots=True)
class Tally:
    """The sums over all requests."""

    requests: int = 0
    finals: int = 0
    left: int = 0
    known: int = 0
    differing: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    examples: list[str] = field(default_factory=list)  # of what was wrong
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.requests += 1
            self.finals += outcome.finals
            self.left += outcome.left and not outcome.finals
            self.kinds[outcome.kind] += 1
            if outcome.finals:
                self.codes[outcome.code] += 1
            if outcome.differs is not None:
                self.known += 1
                self.differing += outcome.differs
            if problem := outcome.problem():
                self._blame(problem)

    def blame(self, problem: str) -> None:
        """Something went wrong that is no request's outcome."""
        with self._lock:
            self._blame(problem)

    def _blame(self, problem: str) -> None:
        self.wrong += 1
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(problem)


@dataclass(frozen=True, slots=True)
class Rest:
    """What a server and its models hold while nobody asks them anything; processes by name."""

    resident_bytes: Mapping[str, int]
    threads: Mapping[str, int]
    zombies: int
    regions: int  # files in shared memory
    gauges: Mapping[str, float]  # that must be zero


@dataclass(frozen=True, slots=True)
class End:
    """How the server ended, and what was left then."""

    status: int
    unanswered: int  # requests that its models still had when it was told to end
    group_is_empty: bool
    regions: int
    errors: tuple[str, ...]  # lines of the server's log that say that something failed


def judge(tally: Tally, warm: Rest, last: Rest, end: End) -> list[str]:
    """Everything that is wrong, in words; nothing when all is well."""
    return [*_of_requests(tally), *_of_rest(warm, last), *_of_end(end)]


def _of_requests(tally: Tally) -> Iterable[str]:
    if tally.wrong:
        yield f"{tally.wrong} of {tally.requests} requests went wrong, such as:"
        yield from tally.examples
    if tally.differing > MOST_TIES * tally.known:
        yield f"{tally.differing} of {tally.known} answers are not what they are alone"


def _of_rest(warm: Rest, last: Rest) -> Iterable[str]:
    for name in warm.resident_bytes.keys() - last.resident_bytes.keys():
        yield f"the process {name} is gone"
    # Of all together: the server's own is so small that the pools of its allocator are a good part of it.
    before, after = (sum(rest.resident_bytes.values()) for rest in (warm, last))
    if after > before * (1 + MOST_GROWTH):
        yield (
            f"resident memory has grown by {after / before - 1:.1%}, from {before >> 20} to {after >> 20} "
            f"MiB; allowed: {MOST_GROWTH:.0%}"
        )
    for name, threads in warm.threads.items():
        most = threads + (MORE_SERVER_THREADS if name == "server" else 0)
        if last.threads.get(name, 0) > most:
            yield f"{name} has {last.threads[name]} threads; it had {threads} after the warm-up"
    if last.regions > warm.regions:
        yield f"{last.regions} files in shared memory; there were {warm.regions} after the warm-up"
    if last.zombies:
        yield f"{last.zombies} dead processes that nobody has waited for"
    for name, value in last.gauges.items():
        if value:
            yield f"{name} is {value:g} while nobody asks anything"


def _of_end(end: End) -> Iterable[str]:
    if end.status not in (0, GAVE_UP):
        yield f"the server ended with status {end.status}"
    if end.unanswered:
        yield f"{end.unanswered} requests had no final response when the server was told to end"
    if not end.group_is_empty:
        yield "processes are left of a server that was stopped"
    if end.regions:
        yield f"{end.regions} files are left in shared memory"
    if end.errors:
        yield f"{len(end.errors)} errors in the server's log, such as:"
        yield from end.errors[:_MOST_EXAMPLES]
