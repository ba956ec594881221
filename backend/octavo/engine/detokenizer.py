"""Tokens of one sequence to text, as they come. Owned by `engine.delivery`, on the engine's thread.

Text that was given out is never taken back: a character is held until all its bytes are there, and what
may still become a stop string is held until that is decided. The cost of a token does not depend on how
many came before.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from octavo.engine.stop_strings import StopMatcher
from octavo.engine.tokenizer import Tokenizer
from octavo.request import SamplingParams

_MAX_CHARACTER_BYTES = 4
_INVALID = "\ufffd"


class Piece(NamedTuple):
    """`text` is exactly what the next `num_tokens` tokens say. `stopped`: a stop string was completed."""

    text: str
    num_tokens: int
    stopped: bool = False


class _Boundary(NamedTuple):
    """A place between two tokens where text may be cut: no character is half there."""

    num_tokens: int  # of the sequence, before it
    num_chars: int


class Detokenizer:
    """`prompt_token_ids` decide whether the text begins here, and may end in half a character.

    A stop string that is completed within the first `min_tokens` tokens does not count. Of stop strings
    that overlap, the first to be completed counts; of those completed by the same character, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._undecoded = b""  # the beginning of a character
        self._prompt_is_half = False  # whether those bytes are all the prompt's
        self._strip_space = self._vocabulary.strips_first_space
        self._read_prompt(prompt_token_ids)
        self._held: deque[str] = deque()  # what each token that was not given out says
        self._boundaries: deque[_Boundary] = deque()
        self._num_tokens = 0  # of the sequence, so far
        self._num_chars = 0
        self._num_given_tokens = 0
        self._num_given_chars = 0

    def _read_prompt(self, token_ids: Sequence[int]) -> None:
        """Takes up the bytes of the prompt's last character, in case they are only half of one."""
        end = b""
        for data in self._vocabulary.spoken(reversed(token_ids), self._skip_special):
            end = data + end
            if len(end) >= _MAX_CHARACTER_BYTES:
                break
        self._decode(end)
        self._prompt_is_half = bool(self._undecoded)
        self._strip_space = self._strip_space and not end

    def push(self, token_ids: Sequence[int], final: bool = False) -> Piece:
        """Takes the next tokens and gives out the text that is decided, with the number of tokens it is of.

        With `final` everything comes out, half a character as U+FFFD. Once a stop string is completed the
        text ends before it (after it with `include_stop_str_in_output`), the token that completed it is
        the last one counted, and nothing more may be pushed.
        """
        for data in self._vocabulary.spoken(token_ids, self._skip_special):
            text = self._read(data)
            self._held.append(text)
            self._num_tokens += 1
            stop = self._append(text)
            if stop is not None:
                return self._give_up_to(self._num_tokens, stop, stopped=True)
            if not self._undecoded:
                self._boundaries.append(_Boundary(self._num_tokens, self._num_chars))
        if final:
            return self._finish()
        num_held_chars = self._stops.num_held_chars if self._stops else 0
        num_tokens, num_chars = self._num_given_tokens, self._num_given_chars
        while self._boundaries and self._boundaries[0].num_chars <= self._num_chars - num_held_chars:
            boundary = self._boundaries.popleft()
            num_tokens, num_chars = boundary.num_tokens, boundary.num_chars
        return self._give_up_to(num_tokens, num_chars)

    def _read(self, data: bytes) -> str:
        """What the sequence says now that it did not before these bytes."""
        text = self._decode(data)
        if self._prompt_is_half and data:
            # Either these bytes complete the prompt's last character, or that is the prompt's U+FFFD.
            text = text.removeprefix(_INVALID)
            self._prompt_is_half = False
        if self._strip_space and text:
            text = text.removeprefix(" ")
            self._strip_space = False
        return text

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._undecoded + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._undecoded = data[num_decoded:]
        return text

    def _append(self, text: str) -> int | None:
        """Returns at which character of the sequence its text has to end, if a stop string says so."""
        self._num_chars += len(text)
        if self._stops is None:
            return None
        searched = 0
        while found := self._stops.feed(text[searched:]):
            end, length = found
            searched += end
            if self._num_tokens > self._min_tokens:
                position = self._num_chars - len(text) + searched
                return position if self._include_stop else position - length
        return None

    def _finish(self) -> Piece:
        rest = self._decode(b"", final=True)
        stop = None
        if rest and self._held and not self._prompt_is_half:
            self._held[-1] += rest
            stop = self._append(rest)
        end = self._num_chars if stop is None else stop
        return self._give_up_to(self._num_tokens, end, stopped=stop is not None)

    def _give_up_to(self, num_tokens: int, num_chars: int, stopped: bool = False) -> Piece:
        """Counts are of the whole sequence."""
        num_new = num_tokens - self._num_given_tokens
        text = "".join([self._held.popleft() for _ in range(num_new)])
        piece = Piece(text[: num_chars - self._num_given_chars], num_new, stopped)
        self._num_given_tokens, self._num_given_chars = num_tokens, num_chars
        return piece
