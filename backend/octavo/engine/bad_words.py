"""The ways to write `bad_words` in tokens. Used by `Engine.make_request`, on a tokenizer's thread."""

from collections.abc import Iterable

from octavo.engine.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text, and as it stands after a space, where most tokenizers write it with
    other tokens, of another number even. Raises `InvalidArgument` for a lone surrogate."""
    spellings: set[tuple[int, ...]] = set()
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            spellings.add(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return tuple(sorted(spellings - {()}))
