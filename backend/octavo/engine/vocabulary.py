"""What each token says: its bytes. Text is their concatenation, read as UTF-8.

`engine.tokenizer` makes a `Vocabulary` from the tokenizer's vocabulary and decoder, and decodes by it;
`engine.detokenizer` decodes by it token by token. A token's bytes do not depend on its neighbours, so
text can be given out as it comes and is never taken back. Bytes that are no UTF-8 become U+FFFD, one for
each maximal part of a character (the practice of Unicode's chapter 3.9, and of Python).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

from octavo.errors import ConfigError

MAX_VOCAB = 2**22  # ids that a file may claim: far above every tokenizer, and a table of them is small

# How the two kinds of tokenizer decode, as the library writes it down.
_SENTENCE_PIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[id]` is empty for an id that is not in use."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()
    strips_first_space: bool = False  # SentencePiece puts a space before a text, which is not part of it

    @classmethod
    def of(cls, backend: Backend, where: str, size: int = 0) -> "Vocabulary":
        """Of at least `size` ids. Raises `ConfigError` when the tokenizer does not decode bytes in one of
        the two known ways."""
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
        steps = decoder.get("decoders", [decoder])
        if [step["type"] for step in steps] == ["ByteLevel"]:
            convert, strips = _from_byte_characters, False
        elif steps[:3] == _SENTENCE_PIECE and steps[3:] in ([], [_STRIP]):
            convert, strips = _from_sentence_piece, bool(steps[3:])
        else:
            raise ConfigError(
                f"{where}: the tokenizer decodes by {json.dumps(decoder)[:200]}; supported: ByteLevel, and "
                "Replace ▁ + ByteFallback + Fuse, with or without Strip of one space on the left"
            )
        ids = backend.get_vocab(with_added_tokens=True)
        largest = max(ids.values(), default=-1)
        if largest >= MAX_VOCAB:
            raise ConfigError(f"{where}: the tokenizer has the id {largest}; allowed: below {MAX_VOCAB}")
        token_bytes = [b""] * max(size, largest + 1)
        for token, token_id in ids.items():
            token_bytes[token_id] = convert(token)
        added = backend.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(tuple(token_bytes), special, strips)

    def spoken(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterable[bytes]:
        """The bytes of each token, none for a special token that is to be skipped, nor for an id that no
        token has: models have rows to spare."""
        size, special = len(self.token_bytes), self.special_ids if skip_special_tokens else frozenset()
        return (self.token_bytes[i] if 0 <= i < size and i not in special else b"" for i in ids)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for U+0100 and on, in order."""
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _from_byte_characters(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token that is written as plain text
        return token.encode()


def _from_sentence_piece(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
