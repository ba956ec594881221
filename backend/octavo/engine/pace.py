"""How many tokens a step may have so that it takes about as long as is wanted: `target_itl_ms`.

While a long prompt is computed in chunks beside the sequences that decode, these get their next token when
the step is over; so the size of the chunks is the time between their tokens. Owned by the scheduler, engine
thread. Torch-free.
"""

from octavo.engine.step_times import StepTimes

_HALF_LIFE_STEPS = 8  # after so many steps without one of its size, a size counts half


class Pace:
    """`budget` is what takes `target_s` by the line through the steps so far (`StepTimes`), but never below
    `least_tokens` or above `most_tokens`. It begins at the least, and learns with each step."""

    def __init__(self, target_s: float, least_tokens: int, most_tokens: int) -> None:
        self._target_s = target_s
        self._least = least_tokens
        self._most = most_tokens
        self.times = StepTimes()
        self.budget = least_tokens

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step has computed so many tokens in so long; a time of 0 is none and says nothing."""
        self.times.note(num_tokens, duration_s)
        line = self.times.line(_HALF_LIFE_STEPS)
        if line is None:
            return
        base_s, slope_s = line
        if slope_s > 0:
            fitting = (self._target_s - base_s) / slope_s
        else:  # more tokens seem to take no more time
            fitting = self._most if base_s <= self._target_s else self._least
        self.budget = int(max(self._least, min(fitting, self._most)))
