"""What a replay came to: counted while it runs by `Tally`, told by `Report`. Used by `simulate.py`.

What is kept grows with the sequences that are there at once, not with those that ever came, so that a trace
of a million requests takes no more memory than one of ten thousand.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from host_work import PARTS
from octavo.engine.scheduler import SequenceOutput
from octavo.protocol import StepPlan

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Goal:
    """What a request is to get, in seconds: its first token after its arrival, and one more each, in the mean
    over its tokens."""

    ttft_s: float = 1.0
    itl_s: float = 0.05


@dataclass(frozen=True)
class HostBand:
    """This machine's CPU time, in milliseconds a step, of steps with so many sequences."""

    least_sequences: int
    most_sequences: int
    mean_sequences: float
    steps: int
    median_ms: float
    p99_ms: float
    parts_ms: dict[str, float]  # means


@dataclass(frozen=True)
class Report:
    """All but `host` is of the simulated card, and the same in every replay of a trace.

    Means are over the time in which steps ran. Shares and the hit rate are 0 to 1.
    """

    requests: int
    refused: int  # longer than a sequence may be
    steps: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_per_s: float  # requests that got what the goal says
    ttft_s: dict[str, float]  # by quantile: from the arrival to the first token
    itl_s: dict[str, float]  # between two tokens of a sequence
    preemptions: int
    prefix_hit_rate: float  # of the tokens of those that were admitted, again after a preemption too
    kv_allocated: float  # share of the cache that belongs to a sequence: the mean
    kv_allocated_most: float
    kv_holding: float  # share of what is allocated that holds a token
    running: float
    running_most: int
    running_when_full: float | None  # while others waited: how many the cache or the limit let run
    host: list[HostBand]


class Samples:
    """Numbers, each as often as it came, to four digits: there are few thousand different ones then."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        self._counts[float(f"{value:.3e}")] += count

    def quantile(self, share: float) -> float:
        """The smallest number that at least such a share of all are no larger than; 0 of none."""
        wanted = share * self._counts.total()
        reached = 0
        for value in sorted(self._counts):
            reached += self._counts[value]
            if reached >= wanted:
                return value
        return 0.0

    def quantiles(self) -> dict[str, float]:
        return {f"p{round(100 * share)}": self.quantile(share) for share in QUANTILES}


class _Host:
    """The steps of one band."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()  # steps by their number of sequences
        self.totals_s = Samples()
        self.parts_s: Counter[str] = Counter()

    def band(self) -> HostBand:
        steps = self.sizes.total()
        return HostBand(
            min(self.sizes),
            max(self.sizes),
            sum(size * count for size, count in self.sizes.items()) / steps,
            steps,
            1e3 * self.totals_s.quantile(0.5),
            1e3 * self.totals_s.quantile(0.99),
            {part: 1e3 * self.parts_s[part] / steps for part in PARTS},
        )


class Tally:
    """Counts as a replay goes. `num_blocks` of `block_size` tokens are the whole cache."""

    def __init__(self, num_blocks: int, block_size: int, goal: Goal) -> None:
        self._num_blocks, self._block_size, self._goal = num_blocks, block_size, goal
        # By sequence, of those without a token: when it came, and how many it is to get.
        self._arrived: dict[int, tuple[float, int]] = {}
        self._due_s: dict[int, float] = {}  # of those that may reach the goal: by when they have to end
        self._token_s: dict[int, float] = {}  # when the last one came, of the others
        self._table_blocks: dict[int, int] = {}  # by sequence that has blocks
        self._ttft, self._itl = Samples(), Samples()
        self._host: dict[int, _Host] = {}  # by the number of sequences in bits: from 2^n to 2^(n+1) - 1
        self._busy_s = self._full_s = 0.0
        self._allocated = self._held = self._running = self._running_full = 0.0  # times seconds
        self._steps = self._refused = self._output_tokens = self._good = 0
        self._allocated_most = self._running_most = 0

    def arrive(self, seq_id: int, arrival_s: float, output_tokens: int) -> None:
        self._arrived[seq_id] = arrival_s, output_tokens

    def refuse(self) -> None:
        self._refused += 1

    def step(self, plan: StepPlan, duration_s: float, used_blocks: int, others_wait: bool) -> None:
        """A step of the card. Every running sequence is in it, as always without beams."""
        empty, size = 0, self._block_size
        for seq_id in plan.finished:
            self._table_blocks.pop(seq_id, None)
        for seq_id, start, length, first_block, block_ids, _ in plan.slices:
            if block_ids:
                self._table_blocks[seq_id] = first_block + len(block_ids)
            # Only full blocks are shared, so what is empty is each sequence's own.
            empty += self._table_blocks[seq_id] * size - start - length
        running = len(plan.slices)
        self._steps += 1
        self._busy_s += duration_s
        self._allocated += used_blocks * duration_s
        self._held += (used_blocks * size - empty) * duration_s
        self._running += running * duration_s
        self._allocated_most = max(self._allocated_most, used_blocks)
        self._running_most = max(self._running_most, running)
        if others_wait:
            self._full_s += duration_s
            self._running_full += running * duration_s

    def take(self, now_s: float, outputs: Iterable[SequenceOutput]) -> None:
        """The step's tokens have come."""
        waited: Counter[float] = Counter()
        for output in outputs:
            before_s = self._token_s.get(output.seq_id)
            if before_s is None:
                arrival_s, output_tokens = self._arrived.pop(output.seq_id)
                ttft_s = now_s - arrival_s
                self._ttft.add(ttft_s)
                if ttft_s <= self._goal.ttft_s:
                    self._due_s[output.seq_id] = now_s + self._goal.itl_s * (output_tokens - 1)
            else:
                waited[before_s] += 1
            self._output_tokens += len(output.token_ids)
            if output.finish_reason:
                self._token_s.pop(output.seq_id, None)
                self._good += now_s <= self._due_s.pop(output.seq_id, -1.0)
            else:
                self._token_s[output.seq_id] = now_s
        for before_s, count in waited.items():
            self._itl.add(now_s - before_s, count)

    def host(self, num_sequences: int, spent_s: Mapping[str, float]) -> None:
        band = self._host.setdefault(num_sequences.bit_length(), _Host())
        band.sizes[num_sequences] += 1
        band.totals_s.add(sum(spent_s.values()))
        band.parts_s.update(spent_s)

    def report(
        self, *, requests: int, duration_s: float, prompt_tokens: int, preemptions: int, hit_rate: float
    ) -> Report:
        busy_s, elapsed_s = self._busy_s or 1.0, duration_s or 1.0
        return Report(
            requests=requests,
            refused=self._refused,
            steps=self._steps,
            duration_s=duration_s,
            output_tokens=self._output_tokens,
            output_tokens_per_s=self._output_tokens / elapsed_s,
            prompt_tokens_per_s=prompt_tokens / elapsed_s,
            goodput_per_s=self._good / elapsed_s,
            ttft_s=self._ttft.quantiles(),
            itl_s=self._itl.quantiles(),
            preemptions=preemptions,
            prefix_hit_rate=hit_rate,
            kv_allocated=self._allocated / busy_s / self._num_blocks,
            kv_allocated_most=self._allocated_most / self._num_blocks,
            kv_holding=self._held / (self._allocated * self._block_size) if self._allocated else 0.0,
            running=self._running / busy_s,
            running_most=self._running_most,
            running_when_full=self._running_full / self._full_s if self._full_s else None,
            host=[band.band() for _, band in sorted(self._host.items())],
        )
