"""Finds stop strings in a text that arrives in pieces. Used by `engine.detokenizer`: the strings are compiled
once, and each sequence has a `StopMatcher`.

All strings are searched for at once by the automaton of Aho and Corasick (1975). Its state after a
character is the longest beginning of any stop string that the text ends with; the length of that is
exactly what must be held back, since it may still become a stop string.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The automaton. Immutable. A node stands for the beginning of a stop string; node 0 for none."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # the trie; node 0 is the root
        self._depth = [0]
        self._found = [0]  # the length of the longest string that ends at a node
        for string in strings:
            self._insert(string)
        self._fallback = self._fallbacks()

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(0)
            node = child
        self._found[node] = len(string)

    def _fallbacks(self) -> list[int]:
        """For each node the longest proper ending of its text that is in the trie as well."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._found[node] = self._found[node] or self._found[fallback[node]]
            for character, child in self._next[node].items():
                fallback[child] = self._step(fallback[node], character, fallback)
                queue.append(child)
        return fallback

    def _step(self, node: int, character: str, fallback: Sequence[int]) -> int:
        while node and character not in self._next[node]:
            node = fallback[node]
        return self._next[node].get(character, 0)

    def step(self, node: int, character: str) -> int:
        return self._step(node, character, self._fallback)

    def completed(self, node: int) -> int:
        """The length of the longest string that ends here, or 0."""
        return self._found[node]

    def num_held_chars(self, node: int) -> int:
        """How many characters before this node may still become a stop string."""
        while node and not self._next[node]:  # a stop string that its caller passed over: it becomes no more
            node = self._fallback[node]
        return self._depth[node]


@lru_cache(maxsize=64)
def compiled(strings: tuple[str, ...]) -> StopStrings:
    """Shared by a request's sequences, and by requests that stop at the same strings."""
    return StopStrings(strings)


class StopMatcher:
    """Takes text by `feed`. Cost: constant for a character, whatever the number of strings."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._stops = compiled(strings)
        self._node = 0

    @property
    def num_held_chars(self) -> int:
        """How much of the end of the text fed so far may still become a stop string."""
        return self._stops.num_held_chars(self._node)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Goes on with `text` up to the first stop string that is completed in it.

        Returns (end, length): where in `text` it ends, and how long it is (it may have begun in an earlier
        piece). Of several that end there, the longest. None when there is none.
        """
        for i, character in enumerate(text):
            self._node = self._stops.step(self._node, character)
            if length := self._stops.completed(self._node):
                return i + 1, length
        return None
