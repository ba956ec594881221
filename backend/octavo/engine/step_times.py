"""How long steps take by how many tokens they compute: a line fitted to the steps so far.

Owned by the scheduler, engine thread, and read by `Pace` and `SwapChoice`. It has no clock of its own.
Torch-free.
"""

from dataclasses import dataclass
from math import exp2

_RATE = 0.2  # what the last step counts among those of about its size
_LEAST_WEIGHT = 1e-6  # of a size that was seen long ago: any newer one outweighs it, yet it gives a slope


@dataclass(slots=True)
class _Size:
    """Steps of about one size: running means of their tokens and times."""

    num_tokens: float
    duration_s: float
    last_step: int


class StepTimes:
    """`time = base + slope * tokens`, fitted by least squares to the relative errors of running means, one
    for each power of two of tokens: a thousand decode steps on end do not wash out what a step with a prompt
    takes."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the number of bits of their tokens
        self.num_steps = 0

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many tokens in so long; a time of 0 is none and says nothing."""
        if duration_s <= 0:
            return
        self.num_steps += 1
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size(num_tokens, duration_s, 0))
        size.num_tokens += _RATE * (num_tokens - size.num_tokens)
        size.duration_s += _RATE * (duration_s - size.duration_s)
        size.last_step = self.num_steps

    def line(self, half_life_steps: float) -> tuple[float, float] | None:
        """Seconds of a step without tokens, and of each of its tokens; None before the first step.

        After `half_life_steps` without a step of its size, a size counts half. Of one size alone, all is put
        down to the tokens, so that these seem rather too dear until there is another.
        """
        sizes = list(self._sizes.values())
        if not sizes:
            return None
        weights = [self._weight(size, half_life_steps) for size in sizes]
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

    def _weight(self, size: _Size, half_life_steps: float) -> float:
        age = self.num_steps - size.last_step
        weight = max(exp2(-age / half_life_steps), _LEAST_WEIGHT)
        return weight / (size.duration_s * size.duration_s)
