"""Bad words as tokens: both spellings, whatever they have in common."""

import pytest

from octavo.engine.bad_words import bad_word_ids
from octavo.engine.tokenizer import Tokenizer
from tiny import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.load(str(folder))


def spellings(tokenizer: Tokenizer, *words: str) -> set[tuple[str, ...]]:
    return {tuple(map(tokenizer.token_text, ids)) for ids in bad_word_ids(tokenizer, words)}


def test_a_word_is_spelled_at_the_beginning_and_after_a_space(tokenizer: Tokenizer) -> None:
    assert spellings(tokenizer, "the") == {("the",), (" the",)}
    assert spellings(tokenizer, "xin") == {("x", "in"), (" ", "x", "in")}
    assert spellings(tokenizer, "é") == {("\ufffd", "\ufffd"), (" ", "\ufffd", "\ufffd")}


def test_spaces_before_a_word_make_no_difference(tokenizer: Tokenizer) -> None:
    assert spellings(tokenizer, "  the") == spellings(tokenizer, "the") == spellings(tokenizer, "the", " the")
    assert spellings(tokenizer, " ") == {(" ",), (" ", " ")}
    assert bad_word_ids(tokenizer, ()) == ()
