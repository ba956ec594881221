"""One run of `peers.py`: the peers loaded one by one, then asked in turns, each alone on the machine."""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import peer_starts
from peer_process import PeerFailed, PeerProcess, wait_quiet
from peer_report import Results
from peer_table import Peer, Work


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def make_prompts(works: Sequence[Work], vocab_size: int) -> dict[str, list[list[int]]]:
    """By work, the same in every run."""
    rng = random.Random(0)
    return {
        work.name: [
            [rng.randrange(vocab_size) for _ in range(work.prompt_tokens)] for _ in range(work.sequences)
        ]
        for work in works
    }


class Run:
    """The peers that still work, and what was measured. One that fails is out, with its reason noted."""

    def __init__(self, peers: Sequence[Peer], works: Sequence[Work], logs: Path) -> None:
        self._peers = peers
        self._logs = logs
        self._stack = ExitStack()
        self._processes: dict[str, PeerProcess] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.results = Results({work.name: work for work in works})

    def load(self) -> None:
        """One peer at a time, while those that are loaded sleep."""
        for peer in self._peers:
            self.rest()
            say(f"loading {peer.name}")
            try:
                process = PeerProcess(peer, self._logs / f"{peer.name}.log")
            except PeerFailed as error:
                self._fail(peer.name, error)
                continue
            self._stack.callback(process.close)
            self._processes[peer.name] = process
            self.versions[peer.name] = process.versions
            self.results.load_s[peer.name] = process.load_s
            self.results.answers[peer.name] = {}

    def turn(self, prompts: Mapping[str, Sequence[Sequence[int]]], counted: bool) -> None:
        """Each work once on each of its peers, work by work."""
        for work in self.results.works.values():
            for name, process in list(self._processes.items()):
                if work.name not in process.peer.works:
                    continue
                self.rest()
                if name in self._processes:
                    self._ask(process, work, prompts[work.name], counted)

    def _ask(self, process: PeerProcess, work: Work, prompts: Sequence[Sequence[int]], counted: bool) -> None:
        name = process.peer.name
        try:
            answer = process.work(prompts, work.output_tokens)
        except PeerFailed as error:
            self._fail(name, error)
            return
        say(f"  {work}: {name} {work.total_output_tokens / answer['seconds']:.1f} output tokens/s")
        if counted:
            self.results.answers[name].setdefault(work.name, []).append(answer)

    def rest(self) -> None:
        """Waits until all sleep. One that does not would slow the others down."""
        busy, others_cores = wait_quiet(list(self._processes.values()))
        self.results.others_cores.append(others_cores)
        for name, cores in busy.items():
            self._fail(name, PeerFailed(f"it uses {cores:.2f} cores while it has nothing to do"))

    def _fail(self, name: str, error: PeerFailed) -> None:
        say(f"{name} failed: {error}")
        self.results.failures[name] = str(error)
        if process := self._processes.pop(name, None):
            process.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def measure_starts(results: Results, folder: Path, count: int) -> None:
    """Before any peer is loaded."""
    say("starting octavo serve, warm and cold")
    try:
        results.starts_s = peer_starts.octavo_starts_s(count, folder / "logs/octavo-serve.log")
    except PeerFailed as error:
        say(f"failed: {error}")
        results.failures["octavo serve"] = str(error)
