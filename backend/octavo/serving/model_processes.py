"""The processes in which a server runs its models: which there are, and which died without being asked to.

Triton starts one for each model instance. When one dies, by the kernel for want of memory or by a crash, the
server goes on to call its model ready and starts no other; while it reads a model's configuration it even
waits until the stub's timeout. So the launcher looks for itself, here, and `octavo serve` says what it saw.
Everything is read from /proc; nothing here ends or starts anything.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 1.0  # from one look at all processes to the next, at least
_DEAD_S = 3.0  # the server waits for a process that it ended itself within a second
_DEFAULT_GROUP = re.compile(r"(?P<model>.+)_\d+_\d+")  # Triton's name for an instance of an unnamed group
_EXIT_CODE = 49  # the place of that field in /proc/PID/stat, counted from the state


@dataclass(frozen=True, slots=True)
class DeadProcess:
    """`instance` is None where the process died before anybody saw its name; `signal_number` where it ended
    by itself."""

    pid: int
    instance: str | None
    signal_number: int | None

    @property
    def model(self) -> str | None:
        """The name of its model; None where its instance group has a name of its own."""
        match = _DEFAULT_GROUP.fullmatch(self.instance or "")
        return match["model"] if match else None

    def explain(self, http: str) -> str:
        """What happened, what it means and what heals it, for the operator of the server at `http`."""
        which = f"model '{self.model}'" if self.model else "a model"
        who = f"the process of {which} (instance {self.instance or 'unknown'}, process {self.pid})"
        how = "ended by itself"
        if self.signal_number is not None:
            how = f"was killed by {_name(self.signal_number)}"
        if self.signal_number == signal.SIGKILL:
            how += ", which is what the kernel does when memory runs out (dmesg would say so)"
        control = f"http://{http}/v2/repository/models/{self.model or 'MODEL'}"
        return (
            f"{who} {how}. The server goes on to call the model ready, but each of its requests gets an "
            "error, and those that were in flight may get no answer. To heal it: curl -X POST "
            f"{control}/unload, then curl -X POST {control}/load; restart the server when requests were in "
            "flight. To take less memory, lower kv_cache_memory_bytes, max_num_seqs or max_model_len in its "
            "model.json"
        )


def model_processes(server: int) -> dict[int, str]:
    """The processes that run the models of a server: each one's instance, such as "llm_0_0", by its id.

    For a moment there are two of an instance, while a model is being replaced.
    """
    return {pid: _instance(pid) for pid, state in _children(server) if state != "Z"}


class DeathWatch:
    """Tells of each process of a server's models once, when it is dead and the server has left it so for a
    while. A look costs a few milliseconds, so it is taken once a second, however often one asks."""

    def __init__(self, server: int, dead_s: float = _DEAD_S, look_s: float = _LOOK_S) -> None:
        self._server = server
        self._dead_s = dead_s
        self._look_s = look_s
        self._next_look_s = 0.0
        self._names: dict[int, str] = {}
        self._since_s: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self) -> set[int]:
        """Learns the names of the processes that live, and returns those that are dead. Once they are there,
        a call sees to it that none dies nameless."""
        dead = set()
        for pid, state in _children(self._server):
            if state == "Z":
                dead.add(pid)
            else:
                self._names[pid] = _instance(pid)
        return dead

    def deaths(self) -> list[DeadProcess]:
        """Those that were not told of before."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + self._look_s
        dead = self.look()
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in dead}
        self._told &= dead  # an id may be used again
        due = [pid for pid, since_s in self._since_s.items() if now_s - since_s >= self._dead_s]
        new = [pid for pid in due if pid not in self._told]
        self._told |= set(new)
        return [DeadProcess(pid, self._names.get(pid), _signal(pid)) for pid in new]


def _children(server: int) -> Iterator[tuple[int, str]]:
    """Process ids and states; a zombie, "Z", has ended without having been waited for."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since it was listed
            state, parent = _fields(path)[:2]
            if int(parent) == server:
                yield int(path.parent.name), state


def _instance(pid: int) -> str:
    """The second last word of a stub's command line; an empty one of a process that is not a stub yet."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if len(words) > 2 and words[0].endswith(b"stub"):
            return os.fsdecode(words[-2])
    return ""


def _signal(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        return int(_fields(Path(f"/proc/{pid}/stat"))[_EXIT_CODE]) & 0x7F or None
    return None


def _fields(stat: Path) -> list[str]:
    """From the state on: the name before it may hold anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def _name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
