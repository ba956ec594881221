"""How many tokens a step may have so that it takes about as long as is wanted: `target_itl_ms`.

A long prompt is computed in chunks beside the sequences that decode, and these get their next token when the
step is over; so the size of the chunks is the time between their tokens. Owned by the scheduler, engine
thread. It has no clock of its own. Torch-free.
"""

from dataclasses import dataclass
from math import exp2

_RATE = 0.2  # what the last step counts among those of about its size
_HALF_LIFE_STEPS = 8  # after so many steps without one of its size, a size counts half
_LEAST_WEIGHT = 1e-6  # of a size that was seen long ago: any newer one outweighs it, yet it gives a slope


@dataclass(slots=True)
class _Size:
    """Steps of about one size: running means of their tokens and times."""

    num_tokens: float
    duration_s: float
    last_step: int


class Pace:
    """`budget` is what takes `target_s` by the line `time = base + slope * tokens` through the steps so far,
    but never below `least_tokens` or above `most_tokens`. It begins at the least, and learns with each step.

    The line is fitted by least squares to the relative errors of running means, one for each power of two of
    tokens: a thousand decode steps on end do not wash out what a step with a prompt takes.
    """

    def __init__(self, target_s: float, least_tokens: int, most_tokens: int) -> None:
        self._target_s = target_s
        self._least = least_tokens
        self._most = most_tokens
        self._sizes: dict[int, _Size] = {}  # by the number of bits of their tokens
        self._num_steps = 0
        self.budget = least_tokens

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many tokens in so long; a time of 0 is none and says nothing."""
        if duration_s <= 0:
            return
        self._num_steps += 1
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size(num_tokens, duration_s, 0))
        size.num_tokens += _RATE * (num_tokens - size.num_tokens)
        size.duration_s += _RATE * (duration_s - size.duration_s)
        size.last_step = self._num_steps
        base_s, slope_s = self._line()
        if slope_s > 0:
            fitting = (self._target_s - base_s) / slope_s
        else:  # more tokens seem to take no more time
            fitting = self._most if base_s <= self._target_s else self._least
        self.budget = int(max(self._least, min(fitting, self._most)))

    def _line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and of each of its tokens. Of one size alone, all is put down to
        the tokens, so that the budget is rather too low until there is another."""
        sizes = list(self._sizes.values())
        weights = [self._weight(size) for size in sizes]
        total = sum(weights)
        tokens = sum(w * size.num_tokens for w, size in zip(weights, sizes, strict=True)) / total
        time_s = sum(w * size.duration_s for w, size in zip(weights, sizes, strict=True)) / total
        if len(sizes) == 1:
            return 0.0, time_s / tokens
        spread = slope_s = 0.0
        for weight, size in zip(weights, sizes, strict=True):
            apart = size.num_tokens - tokens
            spread += weight * apart * apart
            slope_s += weight * apart * (size.duration_s - time_s)
        slope_s = max(slope_s / spread, 0.0)
        return time_s - slope_s * tokens, slope_s

    def _weight(self, size: _Size) -> float:
        age = self._num_steps - size.last_step
        weight = max(exp2(-age / _HALF_LIFE_STEPS), _LEAST_WEIGHT)
        return weight / (size.duration_s * size.duration_s)
