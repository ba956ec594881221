"""Processes of peers: started, asked in JSON lines, watched for the CPU time they use while idle, ended."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from peer_table import Peer

LONGEST_LOAD_S = 600.0
LONGEST_WORK_S = 600.0
LONGEST_UNREST_S = 30.0  # after a work: thread pools spin a while before they sleep
QUIET_CORES = 0.05
_WINDOW_S = 0.5
_LAST_LINES = 5
_LONGEST_END_S = 40.0  # a tritonserver's own deadline, and a little
_LAST_WORDS_S = 10.0  # from the end of its output to the end of a process
# Of the caller's shell, but each peer is to use the whole machine as it would by itself.
_THREAD_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "LD_PRELOAD")


class PeerFailed(Exception):
    """A peer that could not do its part; the text says why."""


class PeerProcess:
    """A peer with its model loaded. `load_s` runs from the process's start to its ready line.

    Raises `PeerFailed`, as every `ask` does, with the last lines of its log when it ends.
    """

    def __init__(self, peer: Peer, log_path: Path) -> None:
        self.peer = peer
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        start_s = time.perf_counter()
        try:
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [peer.python, peer.script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(peer.environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise PeerFailed(
                f"{peer.python} does not start: {error.strerror}; run make bench-peers"
            ) from error
        try:
            ready = self.ask({"engine": peer.engine, "settings": peer.settings}, LONGEST_LOAD_S)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - start_s
        self.versions: dict[str, str] = ready["versions"]

    def work(self, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
        """The answer, with `seconds` and `tokens`."""
        answer = self.ask({"prompts": prompts, "output": output}, LONGEST_WORK_S)
        if answer["tokens"] != len(prompts) * output:
            raise PeerFailed(f"it made {answer['tokens']} tokens instead of {len(prompts)} x {output}")
        return answer

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        pipe_in, pipe_out = self._pipes()
        try:
            pipe_in.write(json.dumps(message).encode() + b"\n")
            pipe_in.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(pipe_out, selectors.EVENT_READ)
                if not selector.select(timeout_s):
                    raise PeerFailed(f"no answer after {timeout_s:.0f} s{self._last_lines()}")
            line = pipe_out.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
            raise PeerFailed(f"it ended with status {self._process.poll()}{self._last_lines()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerFailed(f"it answered with what is no JSON: {line[:80]!r}") from error
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Lets it end by itself, then ends what is left of its group."""
        for pipe in self._pipes():
            with suppress(BrokenPipeError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _last_lines(self) -> str:
        lines = self._log_path.read_text(errors="replace").split("\n")
        return "".join(f"\n    {line}" for line in [line for line in lines if line.strip()][-_LAST_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would tell a library how many threads to use; nothing is fetched from a hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_THREAD_SETTINGS)}
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **changes}


def wait_quiet(
    processes: Sequence[PeerProcess], timeout_s: float = LONGEST_UNREST_S
) -> tuple[dict[str, float], float]:
    """Waits until every process sleeps. Returns those that still do not, with the cores that each uses, and
    the cores that everything else on this machine uses."""
    pids = [process.pid for process in processes]
    deadline_s = time.monotonic() + timeout_s
    while True:
        before_s, machine_s = cpu_seconds(pids), machine_cpu_s()
        time.sleep(_WINDOW_S)
        others = (machine_cpu_s() - machine_s) / _WINDOW_S
        cores = {pid: (cpu_s - before_s[pid]) / _WINDOW_S for pid, cpu_s in cpu_seconds(pids).items()}
        others -= sum(cores.values())
        busy = {
            process.peer.name: used for process in processes if (used := cores[process.pid]) > QUIET_CORES
        }
        if not busy or time.monotonic() > deadline_s:
            return busy, max(0.0, others)


def machine_cpu_s() -> float:
    """CPU time that the machine has spent on programs and on itself since it was started."""
    user, nice, system, _, _, irq, soft_irq, *_ = Path("/proc/stat").read_text().split()[1:]
    return sum(map(int, (user, nice, system, irq, soft_irq))) / os.sysconf("SC_CLK_TCK")


def cpu_seconds(roots: Sequence[int]) -> dict[int, float]:
    """CPU time so far of each of these processes and its descendants, as far as they still run."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = defaultdict(list)
    own_s: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that ended since it was listed
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            children[int(fields[1])].append(pid)
            own_s[pid] = (int(fields[11]) + int(fields[12])) * tick_s

    def of_tree(pid: int) -> float:
        return own_s.get(pid, 0.0) + sum(map(of_tree, children[pid]))

    return {root: of_tree(root) for root in roots}
