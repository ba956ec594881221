"""From a request's parameters to what the worker is told of its sequences. Used by the scheduler alone.

Log-probabilities of a prompt are asked of the first of a request's sequences, until all are there.
"""

from dataclasses import replace

from octavo.engine.sequence import Sequence
from octavo.protocol import PromptLogprobs, RowSampling
from octavo.request import Request


def row_sampling(request: Request, seed: int, stop_ids: tuple[int, ...]) -> RowSampling:
    """`stop_ids`: what `min_tokens` puts off."""
    params = request.params
    cumulative = request.cumulative_logprob or params.num_sequences > params.n  # what these are ranked by
    return RowSampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        num_logprobs=0 if cumulative and params.logprobs is None else params.logprobs,
        min_tokens=params.min_tokens,
        stop_ids=stop_ids,
        logit_bias=tuple(params.logit_bias.items()),
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        allowed_ids=params.allowed_token_ids,
        bad_words=request.bad_word_ids,
    )


def ask_for_prompt_logprobs(seq: Sequence, num_best: int) -> None:
    seq.prompt_logprobs = []
    seq.sampling = replace(seq.sampling, num_prompt_logprobs=num_best)


def take_prompt_logprobs(seq: Sequence, part: PromptLogprobs) -> None:
    """After a preemption a prompt is computed anew, and some of them come again."""
    if seq.prompt_logprobs is None:
        return
    num_known = 1 + len(seq.prompt_logprobs) - part.position
    assert num_known >= 0, "log-probabilities of prompt tokens are missing"
    seq.prompt_logprobs.extend(part.logprobs[num_known:])
    if not seq.lacks_prompt_logprobs:
        seq.sampling = replace(seq.sampling, num_prompt_logprobs=None)
