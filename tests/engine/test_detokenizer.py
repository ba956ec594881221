"""Tokens to text as they come, against the plain way: decode everything, look for stop strings, cut."""

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.detokenizer import Detokenizer, Piece
from octavo.engine.gguf_tokenizer import build_tokenizer
from octavo.engine.stop_strings import StopMatcher
from octavo.engine.tokenizer import Tokenizer
from octavo.request import SamplingParams
from tiny_gguf import byte_level_metadata, sentence_piece_metadata

BYTE_LEVEL = Tokenizer(build_tokenizer(byte_level_metadata(), "here"), "here", {})
SENTENCE_PIECE = Tokenizer(build_tokenizer(sentence_piece_metadata(), "here"), "here", {})
TOKENIZERS = (BYTE_LEVEL, SENTENCE_PIECE)


def ids_of(text: str, tokenizer: Tokenizer = BYTE_LEVEL) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def of_bytes(data: bytes, tokenizer: Tokenizer = BYTE_LEVEL) -> list[int]:
    """One token a byte."""
    alphabet = {
        said: i for i, said in reversed(list(enumerate(tokenizer.vocabulary.token_bytes))) if len(said) == 1
    }
    return [alphabet[bytes([byte])] for byte in data]


def params(*stop: str, **more: Any) -> SamplingParams:
    return SamplingParams(stop=stop, **{"max_tokens": 10**6, **more})


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[Piece]:
    """One push a token, and a last one without any."""
    result = []
    for i in ids:
        result.append(detokenizer.push([i]))
        if result[-1].stopped:
            return result
    return [*result, detokenizer.push([], final=True)]


def texts(*arguments: Any) -> list[str]:
    return [piece.text for piece in pieces(*arguments)]


# By hand


def test_half_a_character_waits_for_the_other_half() -> None:
    ids = of_bytes("a🙂é".encode())
    found = pieces(Detokenizer(BYTE_LEVEL, [], params()), ids)
    assert [piece.text for piece in found] == ["a", "", "", "", "🙂", "", "é", ""]
    assert [piece.num_tokens for piece in found] == [1, 0, 0, 0, 4, 0, 2, 0]


def test_half_a_character_at_the_end_is_marked() -> None:
    found = pieces(Detokenizer(BYTE_LEVEL, [], params()), of_bytes("a🙂".encode()[:-1]))
    assert found[-1] == Piece("\ufffd", 3)
    assert pieces(Detokenizer(BYTE_LEVEL, [], params()), [])[-1] == Piece("", 0)


def test_bytes_that_are_no_text_do_not_hold_up_the_rest() -> None:
    assert texts(Detokenizer(BYTE_LEVEL, [], params()), of_bytes(b"\xff\xf0\x9fab")) == [
        "\ufffd", "", "", "\ufffda", "b", "",
    ]  # fmt: skip


def test_a_prompt_may_end_in_half_a_character() -> None:
    head, tail = of_bytes(b"x\xf0\x9f"), of_bytes(b"\x99\x82y")
    assert texts(Detokenizer(BYTE_LEVEL, head, params()), tail) == ["", "🙂", "y", ""]
    # When it is not completed it was the prompt's, and the output says nothing of it.
    assert texts(Detokenizer(BYTE_LEVEL, head, params()), ids_of("ab")) == ["a", "b", ""]
    assert pieces(Detokenizer(BYTE_LEVEL, head, params()), []) == [Piece("", 0)]
    skipped = [BYTE_LEVEL.encode("<|endoftext|>")[0]]
    assert pieces(Detokenizer(BYTE_LEVEL, head, params()), skipped)[-1] == Piece("", 1)


def test_the_space_before_a_text_is_left_out_only_at_its_beginning() -> None:
    hello = ids_of("hello hello", SENTENCE_PIECE)
    assert texts(Detokenizer(SENTENCE_PIECE, [], params()), hello) == ["hello", " hello", ""]
    assert texts(Detokenizer(SENTENCE_PIECE, [1], params()), hello) == ["hello", " hello", ""]
    assert texts(Detokenizer(SENTENCE_PIECE, hello, params()), hello) == [" hello", " hello", ""]
    unskipped = params(skip_special_tokens=False)
    assert texts(Detokenizer(SENTENCE_PIECE, [1], unskipped), hello) == [" hello", " hello", ""]


def test_special_tokens_are_counted_and_say_nothing() -> None:
    ids = BYTE_LEVEL.encode("a<|endoftext|>b")
    assert pieces(Detokenizer(BYTE_LEVEL, [], params()), ids)[:2] == [Piece("a", 1), Piece("", 1)]
    unskipped = params(skip_special_tokens=False)
    assert texts(Detokenizer(BYTE_LEVEL, [], unskipped), ids) == ["a", "<|endoftext|>", "b", ""]


def test_a_token_that_the_tokenizer_does_not_know_says_nothing() -> None:
    beyond = BYTE_LEVEL.vocab_size + 5
    assert pieces(Detokenizer(BYTE_LEVEL, [], params()), [beyond])[0] == Piece("", 1)


def test_a_stop_string_over_several_tokens_is_held_back() -> None:
    found = pieces(Detokenizer(BYTE_LEVEL, [], params("END.")), ids_of("x EN EnEND.y"))
    assert [piece.text for piece in found] == ["x", " ", "", "", "EN ", "", "En", "", "", "", ""]
    assert found[-1] == Piece("", 4, stopped=True)
    assert sum(piece.num_tokens for piece in found) == len(ids_of("x EN EnEND."))


def test_a_stop_string_that_does_not_come_is_given_out_at_the_end() -> None:
    assert texts(Detokenizer(BYTE_LEVEL, [], params("END.")), ids_of("xEND")) == ["x", "", "", "", "END"]


def test_the_stop_string_may_be_included() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], params("d", include_stop_str_in_output=True))
    assert detokenizer.push(ids_of("abcdef")) == Piece("abcd", 4, stopped=True)


def test_a_stop_string_in_the_middle_of_a_token_cuts_its_text() -> None:
    the = ids_of("xthe")
    assert len(the) == 2
    assert Detokenizer(BYTE_LEVEL, [], params("h")).push([*the, *the]) == Piece("xt", 2, stopped=True)
    included = params("h", include_stop_str_in_output=True)
    assert Detokenizer(BYTE_LEVEL, [], included).push([*the, *the]) == Piece("xth", 2, stopped=True)


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["abc", "b"], "xabc", "xa"),  # the first to be completed, though the other one began earlier
        (["c", "abc"], "xabc", "x"),  # both by the same character: the longest
        (["abc", "c"], "xabc", "x"),
        (["abcd", "bc"], "xabce", "xa"),
        (["abab", "ba"], "xaba", "xa"),
        (["aab"], "aaab", "a"),
        (["abcabd"], "abcabcabd", "abc"),
        (["\n\n", "\n\n\n"], "x\n\n\n", "x"),
        (["é🙂"], "xéé🙂", "xé"),
    ],
)
def test_several_stop_strings_that_overlap(stop: list[str], text: str, expected: str) -> None:
    found = pieces(Detokenizer(BYTE_LEVEL, [], params(*stop)), of_bytes(text.encode()))
    assert found[-1].stopped
    assert "".join(piece.text for piece in found) == expected


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    ids = of_bytes(b"abcabc")
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "abca"), (4, "abca"), (5, "abcabc")):
        found = pieces(Detokenizer(BYTE_LEVEL, [], params("b", min_tokens=min_tokens)), ids)
        assert "".join(piece.text for piece in found) == expected, min_tokens


def test_a_stop_string_that_did_not_count_is_not_held() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], params("b", min_tokens=1))
    assert detokenizer.push(of_bytes(b"b")) == Piece("b", 1)


def test_a_stop_string_that_ends_in_what_the_last_flush_gives() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], params("\ufffd"))
    assert detokenizer.push(of_bytes(b"a\xe4")) == Piece("a", 1)
    assert detokenizer.push([], final=True) == Piece("", 1, stopped=True)


# Against the plain way


@dataclass(frozen=True)
class Expected:
    """What a whole sequence must come to."""

    text: str
    num_tokens: int
    stopped: bool


def said(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams, final: bool
) -> str:
    """The text of `ids` after `prompt`, without half a character at its end unless `final`."""
    data = b"".join(tokenizer.vocabulary.spoken([*prompt, *ids], params.skip_special_tokens))
    before = tokenizer.decode(prompt, params.skip_special_tokens)
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)
    return (whole.removeprefix(" ") if tokenizer.vocabulary.strips_first_space else whole)[len(before) :]


def is_whole(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(tokenizer.vocabulary.spoken(ids, params.skip_special_tokens)))
    return not decoder.getstate()[0]


def plainly(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], params: SamplingParams
) -> Expected:
    text = tokenizer.decode([*prompt, *ids], params.skip_special_tokens)
    text = text[len(tokenizer.decode(prompt, params.skip_special_tokens)) :]
    lengths = [len(said(tokenizer, prompt, ids[:n], params, final=False)) for n in range(len(ids) + 1)]
    lengths[-1] = len(text)
    for end in range(1, len(text) + 1):
        completed_by = next(n for n, length in enumerate(lengths) if length >= end)
        found = [stop for stop in params.stop if text[:end].endswith(stop)]
        if found and completed_by > params.min_tokens:
            cut = end if params.include_stop_str_in_output else end - max(map(len, found))
            return Expected(text[:cut], completed_by, True)
    return Expected(text, len(ids), False)


def may_become_a_stop(text: str, start: int, params: SamplingParams) -> bool:
    return any(len(stop) > len(text) - start and stop.startswith(text[start:]) for stop in params.stop)


ids_strategy = st.lists(
    st.one_of(
        st.integers(0, BYTE_LEVEL.vocab_size + 3),  # a few that no tokenizer here knows
        st.sampled_from([*ids_of("abthe \n"), *of_bytes("é🙂世".encode())]),
    ),
    max_size=30,
)
stops_strategy = st.lists(st.text(alphabet="abthe \n🙂é\ufffd", min_size=1, max_size=4), max_size=4)


@settings(deadline=None, max_examples=300)
@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    prompt=st.sampled_from(["", "a", " the", "é🙂", "<|endoftext|>"]),
    ids=ids_strategy,
    stops=stops_strategy,
    min_tokens=st.sampled_from([0, 0, 1, 5]),
    include_stop=st.booleans(),
    skip_special=st.booleans(),
    cuts=st.lists(st.integers(0, 5), max_size=30),
    final_with_tokens=st.booleans(),
)
def test_the_pieces_are_the_whole(
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    stops: list[str],
    min_tokens: int,
    include_stop: bool,
    skip_special: bool,
    cuts: list[int],
    final_with_tokens: bool,
) -> None:
    ids = [i % tokenizer.vocab_size for i in ids]
    wanted = params(
        *stops,
        min_tokens=min_tokens,
        include_stop_str_in_output=include_stop,
        skip_special_tokens=skip_special,
    )
    prompt_ids = ids_of(prompt, tokenizer)
    expected = plainly(tokenizer, prompt_ids, ids, wanted)
    detokenizer = Detokenizer(tokenizer, prompt_ids, wanted)

    text, num_tokens, pushed, stopped = "", 0, 0, False
    pushes = [(size, False) for size in [*cuts, len(ids)]]
    pushes = [*pushes[:-1], (len(ids), True)] if final_with_tokens else [*pushes, (0, True)]
    for size, final in pushes:
        piece = detokenizer.push(ids[pushed : pushed + size], final)
        pushed = min(pushed + size, len(ids))
        text, num_tokens, stopped = text + piece.text, num_tokens + piece.num_tokens, piece.stopped
        if stopped:
            break
        seen, given = ids[:pushed], ids[:num_tokens]
        if final:
            break
        # What was given out is the text of exactly these tokens, and they end with a whole character.
        assert text == said(tokenizer, prompt_ids, given, wanted, final=False)
        assert is_whole(tokenizer, [*prompt_ids, *given], wanted)
        # Nothing is held without a reason: at every later place there is half a character, or a stop
        # string may have begun before it.
        so_far = said(tokenizer, prompt_ids, seen, wanted, final=False)
        for n in range(num_tokens + 1, pushed + 1):
            place = len(said(tokenizer, prompt_ids, ids[:n], wanted, final=False))
            assert not is_whole(tokenizer, [*prompt_ids, *ids[:n]], wanted) or any(
                may_become_a_stop(so_far, start, wanted) for start in range(place)
            )
    assert Expected(text, num_tokens, stopped) == expected


@settings(deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(1, 4), max_size=40))
def test_any_bytes_in_any_pieces_read_as_at_once(data: bytes, cuts: list[int]) -> None:
    """In particular no U+FFFD but for bytes that are no UTF-8."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], params())
    text = "".join(piece.text for piece in pieces(detokenizer, of_bytes(data)))
    assert text == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_whole_text_never_shows_a_replacement(text: str) -> None:
    for tokenizer in TOKENIZERS:
        found = texts(Detokenizer(tokenizer, [], params()), ids_of(text, tokenizer))
        assert "\ufffd" not in "".join(found).replace("\ufffd", "", text.count("\ufffd"))


@settings(deadline=None)
@given(
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=5),
    parts=st.lists(st.text(alphabet="abc", max_size=6), max_size=8),
)
def test_the_automaton_finds_what_a_search_finds(strings: list[str], parts: list[str]) -> None:
    stops, text = StopMatcher(tuple(strings)), ""
    for part in parts:
        rest = part
        while found := stops.feed(rest):
            end, length = found
            assert not any((text + rest[:i]).endswith(s) for i in range(1, end) for s in strings)
            text, rest = text + rest[:end], rest[end:]
            assert length == max(len(s) for s in strings if text.endswith(s))
        assert not any((text + rest[:i]).endswith(s) for i in range(1, len(rest) + 1) for s in strings)
        text += rest
        held = max((n for s in strings for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert stops.num_held_chars == held


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """With many stop strings, and with a stop string that keeps almost coming."""
    stops = params(*(f"stop{i}!" for i in range(60)), "a" * 50 + "b")
    token = ids_of("a") * 200

    def cost_s(num_pushes: int) -> float:
        detokenizer = Detokenizer(BYTE_LEVEL, [], stops)
        started_s = time.process_time()
        for _ in range(num_pushes):
            detokenizer.push(token)
        return time.process_time() - started_s

    cost_s(10)
    assert cost_s(400) < 40 * max(cost_s(40), 1e-3)


def test_half_a_character_before_tokens_without_text_costs_nothing() -> None:
    """All of them have to wait for what becomes of that character."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], params())
    started_s = time.process_time()
    assert detokenizer.push(of_bytes(b"\xf0")) == Piece("", 0)
    for _ in range(20_000):
        assert detokenizer.push([0]) == Piece("", 0)
    assert detokenizer.push(of_bytes(b"\x9f\x99\x82")) == Piece("🙂", 20_004)
    assert time.process_time() - started_s < 5
