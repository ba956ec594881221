"""Of a request's sequences, only the best are answered: a sink that stands before the request's own.

`engine.delivery` puts it there, on the engine's thread.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from octavo.request import Sink, TextDelta


class BestOf:
    """Keeps what the sequences say until all are done; then the `n` with the highest cumulative
    log-probabilities come out, the best first (of equals, the first), each whole in one delta."""

    def __init__(self, n: int, sink: Sink) -> None:
        self._n = n
        self._sink = sink
        self._deltas: defaultdict[int, list[TextDelta]] = defaultdict(list)  # by sequence

    def __call__(self, delta: TextDelta) -> None:
        if delta.error:
            self._deltas.clear()
            self._sink(delta)
            return
        self._deltas[delta.index].append(delta)
        if delta.request_finished:
            self._answer(delta)

    def _answer(self, last: TextDelta) -> None:
        prompt_logprobs = [d.prompt_logprobs for deltas in self._deltas.values() for d in deltas]
        whole = [_joined(deltas) for _, deltas in sorted(self._deltas.items())]
        best = sorted(whole, key=lambda delta: -delta.cumulative_logprob)[: self._n]
        for index, delta in enumerate(best):
            ends = index + 1 == self._n
            self._sink(
                replace(
                    delta,
                    index=index,
                    prompt_logprobs=next(filter(None, prompt_logprobs), None) if index == 0 else None,
                    stats=last.stats if ends else None,
                    request_finished=ends,
                )
            )


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta of all those of a sequence."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )
