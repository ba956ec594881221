"""What a request says of tokens: whether the model has them, and whether they leave it a choice.

Used by `Engine.make_request`, on a tokenizer's thread. Torch-free.
"""

from collections.abc import Collection, Iterable, Sequence

from octavo.errors import InvalidArgument
from octavo.request import SamplingParams


def check_ids(prompt_name: str, prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidArgument` that names an id which the model does not have. `prompt_name` is what the
    client calls the prompt."""
    named = {
        prompt_name: prompt,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": tuple(params.logit_bias),
    }
    for name, tokens in named.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InvalidArgument(f"'{name}' holds {str(bad)[:80]}; allowed: 0 to {vocab_size - 1}")
    num_allowed = len(params.allowed_token_ids or ())
    if num_allowed > vocab_size:
        raise InvalidArgument(f"'allowed_token_ids' has {num_allowed} ids; the vocabulary has {vocab_size}")


def check_choice(
    params: SamplingParams,
    bad_words: Iterable[tuple[int, ...]],
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> None:
    """Raises `InvalidArgument` where too few tokens are left to begin with. `bad_words` are the tokens of
    `params.bad_words`."""
    forbidden = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    allowed = params.allowed_token_ids
    if not (vocab_size - len(forbidden) if allowed is None else set(allowed) - forbidden):
        raise InvalidArgument(
            "'bad_words' and 'min_tokens', before which no stop token may come, leave nothing of "
            "'allowed_token_ids' (every token, when unset); allow one more"
        )
    num_ends = len(params.stop_token_ids) + len(eos_token_ids)
    if params.use_beam_search and params.num_sequences + num_ends > vocab_size:
        raise InvalidArgument(
            f"a beam search of width {params.num_sequences} needs as many tokens that do not end it; the "
            f"vocabulary has {vocab_size}, and up to {num_ends} are stop tokens: lower 'beam_width'"
        )
