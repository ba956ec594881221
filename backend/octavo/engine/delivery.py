"""From tokens to text, for one request: detokenises, stops at stop strings, keeps log-probabilities aligned.

Owned by the engine, on the engine's thread. A delta carries exactly the tokens whose text it carries, so
text, token ids, log-probabilities and counts agree even while a stop string is held back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.engine.best_of import BestOf
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.scheduler import SequenceOutput
from octavo.engine.timeline import Timeline
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import OctavoError
from octavo.protocol import TokenLogprobs
from octavo.request import FinishReason, Logprob, Request, Sink, TextDelta


@dataclass(slots=True)
class _Continuation:
    """One sequence: tokens that arrived and whose text is not decided yet."""

    index: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class Delivery:
    def __init__(
        self,
        request: Request,
        sink: Sink,
        tokenizer: Tokenizer,
        seq_ids: Sequence[int],
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self.seq_ids = tuple(seq_ids)
        self.timeline = Timeline(request.arrived_s, on_start)
        params = request.params
        ranks = params.num_sequences > params.n and not params.use_beam_search
        self._sink = BestOf(params.n, sink) if ranks else sink
        self._tokenizer = tokenizer
        self._prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None  # until they are sent
        self._open = {
            seq_id: _Continuation(index, Detokenizer(tokenizer, request.prompt_token_ids, params))
            # A beam search says what it found as the output of its first n sequences.
            for index, seq_id in enumerate(seq_ids[: params.n] if params.use_beam_search else seq_ids)
        }

    @property
    def finished(self) -> bool:
        return not self._open

    def deliver(self, output: SequenceOutput) -> FinishReason | None:
        """Sends what is decided of this sequence. Returns its finish reason once it has one, perhaps found
        here: a stop string."""
        self.timeline.note_token()
        if output.embedding is not None:
            return self._deliver_embedding(output)
        state = self._open[output.seq_id]
        state.token_ids.extend(output.token_ids)
        state.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = (None, *map(self._explain, output.prompt_logprobs))
        reason = output.finish_reason
        # A token that ends the sequence is counted but has no text, unless it was asked for.
        params = self.request.params
        mute = output.stopped_by_token and not params.include_stop_str_in_output
        spoken = output.token_ids[:-1] if mute else output.token_ids
        piece = state.detokenizer.push(spoken, final=reason is not None)
        num_tokens = piece.num_tokens
        if piece.stopped:
            reason = "stop"
        elif mute:
            num_tokens += 1
        if num_tokens or piece.text or reason:
            if reason:
                del self._open[output.seq_id]
            self._send(state, piece.text, num_tokens, reason)
        return reason

    def fail(self, error: OctavoError) -> None:
        self._open.clear()
        self._sink(
            TextDelta(
                self.request.id,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                error=error,
                request_finished=True,
            )
        )

    def _deliver_embedding(self, output: SequenceOutput) -> FinishReason | None:
        self._open.clear()
        self._sink(
            TextDelta(
                self.request.id,
                finish_reason=output.finish_reason,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                embedding=output.embedding,
                stats=self.timeline.stats(),
                request_finished=True,
            )
        )
        return output.finish_reason

    def _send(self, state: _Continuation, text: str, num_tokens: int, reason: FinishReason | None) -> None:
        token_ids = tuple(state.token_ids[:num_tokens])
        del state.token_ids[:num_tokens]
        logprobs: tuple[tuple[Logprob, ...], ...] = ()
        if state.logprobs:
            entries = state.logprobs[:num_tokens]
            del state.logprobs[:num_tokens]
            state.cumulative_logprob += sum(entry.logprobs[0] for entry in entries)
            if self.request.params.logprobs is not None:
                logprobs = tuple(self._explain(entry) for entry in entries)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self._sink(
            TextDelta(
                request_id=self.request.id,
                index=state.index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                cumulative_logprob=state.cumulative_logprob,
                finish_reason=reason,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                prompt_logprobs=prompt_logprobs,
                stats=self.timeline.stats() if self.finished else None,
                request_finished=self.finished,
            )
        )

    def _explain(self, entry: TokenLogprobs) -> tuple[Logprob, ...]:
        return tuple(
            Logprob(token_id, logprob, rank, self._tokenizer.token_text(token_id))
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        )
