"""Many requests at once: what may be asked, how far they are, the results. No I/O but the progress bar's."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO, cast

from octavo_client._base import Messages, Value, chat_inputs
from octavo_client._errors import OctavoError
from octavo_client._types import ChatMessage, Completion, Prompt, SamplingParams

_BAR_CHARS = 24
_REDRAW_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """Of `generate_many`, told after each request that has ended. `done` counts the failed ones too."""

    done: int
    total: int
    failed: int
    output_tokens: int
    elapsed_s: float


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ManyResults:
    """In the order of the prompts: `completions[i]` is None where `failures[i]` says why."""

    completions: tuple[Completion | None, ...]
    failures: Mapping[int, OctavoError]

    def __iter__(self) -> Iterator[Completion | OctavoError]:
        for index, completion in enumerate(self.completions):
            yield self.failures[index] if completion is None else completion

    def __len__(self) -> int:
        return len(self.completions)

    def all(self) -> list[Completion]:
        """The completions. Raises an ExceptionGroup of the failures if there are any."""
        if self.failures:
            raise ExceptionGroup(
                f"{len(self.failures)} of {len(self)} requests failed", list(self.failures.values())
            )
        return [completion for completion in self.completions if completion is not None]


class Collector:
    """Takes results in any order. `progress`: a function to tell, or True for a bar on stderr."""

    def __init__(self, total: int, progress: OnProgress | bool | None) -> None:
        self._completions: list[Completion | None] = [None] * total
        self._failures: dict[int, OctavoError] = {}
        self._started_s = time.monotonic()
        self._tokens = 0
        self._done = 0
        self._tell = ProgressBar(sys.stderr) if progress is True else (progress or None)

    def put(self, index: int, result: Completion | OctavoError) -> None:
        if isinstance(result, OctavoError):
            self._failures[index] = result
        else:
            self._completions[index] = result
            self._tokens += result.usage.completion_tokens
        self._done += 1
        if self._tell is not None:
            elapsed_s = time.monotonic() - self._started_s
            total = len(self._completions)
            self._tell(Progress(self._done, total, len(self._failures), self._tokens, elapsed_s))

    def results(self) -> ManyResults:
        return ManyResults(tuple(self._completions), dict(sorted(self._failures.items())))


class ProgressBar:
    """One line, written over. Nothing but the last state where that would fill a log."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn_s = float("-inf")

    def __call__(self, progress: Progress) -> None:
        last = progress.done == progress.total
        on_terminal = self._out.isatty()
        if not last and (not on_terminal or progress.elapsed_s - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = progress.elapsed_s
        filled = _BAR_CHARS * progress.done // progress.total
        rate = progress.output_tokens / max(progress.elapsed_s, 1e-9)
        text = f"[{'#' * filled:<{_BAR_CHARS}}] {progress.done}/{progress.total}, {rate:.0f} tokens/s"
        text += f", {progress.failed} failed" if progress.failed else ""
        start = "\r\033[K" if on_terminal else ""
        self._out.write(f"{start}{text}" + ("\n" if last else ""))
        self._out.flush()


def inputs_of(item: Prompt | Messages) -> Prompt | Mapping[str, Value]:
    """What a request is built from: a prompt as it is, and for messages the input that stands for them."""
    if not isinstance(item, str) and item and isinstance(item[0], ChatMessage | Mapping):
        return chat_inputs(cast(Messages, item), {})[0]
    return cast(Prompt, item)


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """Raises ValueError where there is one too many or too few."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling parameters")
    return params


def check_options(options: Mapping[str, object], concurrency: int) -> None:
    """Raises ValueError."""
    if "request_id" in options:
        raise ValueError("one request_id for many requests would cancel them all: leave it out")
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; allowed: 1 and more")
