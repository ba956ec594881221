"""An executor without a model that sees every mistake of the scheduler and of the block manager.

Each KV slot remembers a digest of all tokens up to the one that was stored there. Before a slice is computed,
every slot that it would attend to must hold the digest of exactly that prefix: a block that was shared,
copied, evicted or freed wrongly shows at once. The next token is a function of the prefix alone, so a whole
run must give the tokens that `expected_tokens` gives, however it was scheduled.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from octavo.errors import StepFailed
from octavo.protocol import BlockFile, SequenceResult, StepPlan, StepResult, TokenLogprobs
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


def next_logprobs(prefix: bytes) -> list[float]:
    """Of all tokens: what a row that asks for log-probabilities is told, which samples the best of them."""
    source = Random(prefix)
    logits = [source.uniform(0, 4) for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


@dataclass
class Row:
    token_ids: list[int]
    seed: int
    num_logprobs: int | None = None
    block_table: list[int] = field(default_factory=list)


class SimulatedExecutor:
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.kv_limit = "the test"
        self._block_size = block_size
        self._slots: list[bytes | None] = [None] * (num_blocks * block_size)
        self._host: list[bytes | None] = [None] * (num_host_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.computed_tokens = 0
        self.copies = 0
        self.fail_next = False
        self.nan_rows: set[int] = set()
        self.files: set[str] = set()  # digests
        self._written: dict[str, list[bytes | None]] = {}  # what was ever saved
        self._result: StepResult | None = None

    def submit(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            self.rows.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self.rows
            sampling = new.sampling
            self.rows[new.seq_id] = Row(list(new.token_ids), sampling.seed, sampling.num_logprobs)
        for choice in plan.choices:
            row, parent = self.rows[choice.seq_id], self.rows[choice.parent_id]
            row.token_ids, row.block_table = parent.token_ids.copy(), parent.block_table.copy()
        for choice in plan.choices:
            self.rows[choice.seq_id].token_ids[-1] = choice.token_id
        for piece in plan.slices:
            if piece.block_ids:
                self.rows[piece.seq_id].block_table[piece.first_block :] = piece.block_ids
        if self.fail_next:
            self.fail_next = False
            self._spoil(plan)
            raise StepFailed("made to fail")
        self.files.difference_update(plan.discards)
        for block_id, digest in plan.saves:
            self._save(block_id, digest)
        written = [swap.slot for swap in plan.swaps_out]
        assert len(set(written)) == len(written), "a host slot is written twice"
        for block_id, slot in plan.swaps_out:
            self._move(self._slots, block_id, self._host, slot)
        for copy in plan.copies:
            self.copies += 1
            self._move(self._slots, copy.source, self._slots, copy.destination)
        for block_id, slot in plan.swaps_in:
            self._move(self._host, slot, self._slots, block_id)
        for block_id, digest in plan.loads:
            self._move(self._written[digest], 0, self._slots, block_id)
        for fork in plan.forks:
            assert fork.child_id not in self.rows
            parent = self.rows[fork.parent_id]
            sampling = fork.sampling
            self.rows[fork.child_id] = Row(
                parent.token_ids.copy(), sampling.seed, sampling.num_logprobs, parent.block_table.copy()
            )
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
                results.append(self._sample(seq_id, row))
        self._result = StepResult(plan.step_id, tuple(results))

    def collect(self) -> StepResult:
        assert self._result is not None
        result, self._result = self._result, None
        return result

    def close(self, keep: Iterable[BlockFile] = (), discards: Iterable[str] = ()) -> None:
        pass

    def _save(self, block_id: int, digest: str) -> None:
        content: list[bytes | None] = [None] * self._block_size
        self._move(self._slots, block_id, content, 0)
        before = self._written.setdefault(digest, content)
        assert before == content or None in before, "two contents of one digest"
        self._written[digest] = content
        self.files.add(digest)

    def _move(self, source: list[bytes | None], row: int, target: list[bytes | None], to: int) -> None:
        size = self._block_size
        target[to * size : (to + 1) * size] = source[row * size : (row + 1) * size]

    def _spoil(self, plan: StepPlan) -> None:
        """A step that fails may have written anything to where it was to write."""
        nothing: list[bytes | None] = [b"spoilt"] * self._block_size
        for _, slot in plan.swaps_out:
            self._move(nothing, 0, self._host, slot)
        filled = [copy.destination for copy in plan.copies]
        filled += [moved.block_id for moved in (*plan.swaps_in, *plan.loads)]
        for block_id in filled:
            self._move(nothing, 0, self._slots, block_id)
        for piece in plan.slices:
            row = self.rows[piece.seq_id]
            for position in range(piece.start, piece.start + piece.length):
                block_id, offset = divmod(position, self._block_size)
                self._slots[row.block_table[block_id] * self._block_size + offset] = b"spoilt"

    def _sample(self, seq_id: int, row: Row) -> SequenceResult:
        prefix = prefix_digests(row.token_ids)[-1]
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.num_logprobs is None:
            token = next_token(prefix, row.seed)
        else:
            values = next_logprobs(prefix)
            best = sorted(range(VOCAB), key=lambda t: -values[t])[: max(row.num_logprobs, 1)]
            token = best[0]
            ranks = tuple(range(1, len(best) + 1))
            logprobs = (TokenLogprobs(tuple(best), tuple(values[t] for t in best), ranks),)
        row.token_ids.append(token)
        return SequenceResult(seq_id, (token,), logprobs)

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


def expected_beams(prompt: list[int], params: SamplingParams, max_model_len: int) -> list[list[int]]:
    """What a beam search finds, by its definition: over whole token lists and the whole vocabulary."""
    width, penalty = params.num_sequences, params.length_penalty
    limit = min(params.max_tokens, max_model_len - len(prompt))
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        stops = params.stop_token_ids if length > params.min_tokens else ()
        barred = () if length > params.min_tokens else params.stop_token_ids
        candidates = [
            (total + logprob, [*tokens, token])
            for total, tokens in beams
            for token, logprob in enumerate(next_logprobs(prefix_digests(prompt + tokens)[-1]))
            if token not in barred
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        ended = [c for c in candidates[:width] if length == limit or c[1][-1] in stops]
        done = sorted(done + [(total / length**penalty, tokens) for total, tokens in ended], reverse=True)
        done = done[:width]
        beams = [c for c in candidates if c[1][-1] not in stops][:width]
        hopeless = len(done) == width and beams[0][0] / length**penalty <= done[-1][0]
        if hopeless or (params.early_stopping and len(done) == width):
            break
    return [tokens for _, tokens in done[: params.n]]


def expected_tokens(prompt: list[int], params: SamplingParams, seed: int, max_model_len: int) -> list[int]:
    tokens = prompt.copy()
    while True:
        token = next_token(prefix_digests(tokens)[-1], seed)
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        if token in params.stop_token_ids or generated == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :]
