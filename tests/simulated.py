"""An executor without a model that sees every mistake of the scheduler and of the block manager.

Each KV slot remembers a digest of all tokens up to the one that was stored there. Before a slice is computed,
every slot that it would attend to must hold the digest of exactly that prefix: a block that was shared,
copied, evicted or freed wrongly shows at once. The next token is a function of the prefix alone, so a whole
run must give the tokens that `expected_tokens` gives, however it was scheduled.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from octavo.errors import StepFailed
from octavo.protocol import SequenceResult, StepPlan, StepResult
from octavo.request import SamplingParams

VOCAB = 50


def prefix_digests(token_ids: list[int]) -> list[bytes]:
    digests, previous = [], b""
    for token in token_ids:
        previous = blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()
        digests.append(previous)
    return digests


def next_token(prefix: bytes, seed: int) -> int:
    return blake2b(prefix + seed.to_bytes(8, "little"), digest_size=4).digest()[0] % VOCAB


@dataclass
class Row:
    token_ids: list[int]
    seed: int
    block_table: list[int] = field(default_factory=list)


class SimulatedExecutor:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.kv_limit = "the test"
        self._block_size = block_size
        self._slots: list[bytes | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.computed_tokens = 0
        self.copies = 0
        self.fail_next = False
        self.nan_rows: set[int] = set()
        self._result: StepResult | None = None

    def submit(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            self.rows.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self.rows
            self.rows[new.seq_id] = Row(list(new.token_ids), new.sampling.seed)
        for piece in plan.slices:
            if piece.block_ids:
                self.rows[piece.seq_id].block_table[piece.first_block :] = piece.block_ids
        size = self._block_size
        for copy in plan.copies:
            self.copies += 1
            source, target = copy.source * size, copy.destination * size
            self._slots[target : target + size] = self._slots[source : source + size]
        for fork in plan.forks:
            assert fork.child_id not in self.rows
            parent = self.rows[fork.parent_id]
            self.rows[fork.child_id] = Row(
                parent.token_ids.copy(), fork.sampling.seed, parent.block_table.copy()
            )
        if self.fail_next:
            self.fail_next = False
            raise StepFailed("made to fail")
        assert len({piece.seq_id for piece in plan.slices}) == len(plan.slices)
        for piece in plan.slices:
            self._compute(piece.seq_id, piece.start, piece.length)
        results = []
        for piece in plan.slices:
            for seq_id in piece.samples:
                row = self.rows[seq_id]
                assert piece.start + piece.length == len(row.token_ids)
                if seq_id in self.nan_rows:
                    results.append(SequenceResult(seq_id, error="NaN"))
                    continue
                token = next_token(prefix_digests(row.token_ids)[-1], row.seed)
                row.token_ids.append(token)
                results.append(SequenceResult(seq_id, (token,)))
        self._result = StepResult(plan.step_id, tuple(results))

    def collect(self) -> StepResult:
        assert self._result is not None
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        pass

    def _compute(self, seq_id: int, start: int, length: int) -> None:
        row = self.rows[seq_id]
        assert length > 0
        assert start + length <= len(row.token_ids)
        digests = prefix_digests(row.token_ids)
        slots = [
            row.block_table[position // self._block_size] * self._block_size + position % self._block_size
            for position in range(start + length)
        ]
        for position in range(start):
            assert self._slots[slots[position]] == digests[position], f"sequence {seq_id}, token {position}"
        for position in range(start, start + length):
            self._slots[slots[position]] = None if seq_id in self.nan_rows else digests[position]
        self.computed_tokens += length


def expected_tokens(prompt: list[int], params: SamplingParams, seed: int, max_model_len: int) -> list[int]:
    tokens = prompt.copy()
    while True:
        token = next_token(prefix_digests(tokens)[-1], seed)
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        if token in params.stop_token_ids or generated == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :]
