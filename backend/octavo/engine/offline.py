"""`Engine.generate`: a list of prompts in, a list of completions out, on the caller's thread."""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from octavo.errors import InvalidArgument, OctavoError
from octavo.request import FinishReason, Logprob, SamplingParams, TextDelta

if TYPE_CHECKING:
    from octavo.engine.engine import Engine


@dataclass(slots=True)
class Output:
    """One continuation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Logprob, ...]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Completion:
    """A prompt and its `n` continuations."""

    prompt: str | Sequence[int]
    prompt_token_ids: tuple[int, ...]
    outputs: list[Output]
    # With `SamplingParams.prompt_logprobs`: for each prompt token, itself first; None for the first of them.
    prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None

    @property
    def text(self) -> str:
        """Of the first continuation."""
        return self.outputs[0].text


def generate(
    engine: "Engine",
    prompts: Iterable[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: bool | None,
) -> list[Completion]:
    """Continues all prompts together. `params` is one for all or one for each; `progress` shows a bar, by
    default on a terminal. Raises `InvalidArgument` before anything runs, and a request's own error."""
    if isinstance(prompts, str):
        raise InvalidArgument("'prompts' is a string; give a list of prompts")
    prompts = list(prompts)
    each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise InvalidArgument(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
    requests = [
        engine.make_request(f"offline-{index}", prompt, p)
        for index, (prompt, p) in enumerate(zip(prompts, each, strict=True))
    ]
    for request in requests:
        engine.read_stored(request)
    completions = [
        Completion(prompt, request.prompt_token_ids, [Output() for _ in range(request.params.n)])
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    by_id = {request.id: completion for request, completion in zip(requests, completions, strict=True)}
    bar = _Bar(len(requests), sys.stderr.isatty() if progress is None else progress)
    errors: list[OctavoError] = []

    def take(delta: TextDelta) -> None:
        if delta.error:
            errors.append(delta.error)
            return
        completion = by_id[delta.request_id]
        completion.prompt_logprobs = completion.prompt_logprobs or delta.prompt_logprobs
        output = completion.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        output.logprobs.extend(delta.logprobs)
        output.cumulative_logprob = delta.cumulative_logprob
        output.finish_reason = delta.finish_reason
        bar.advance(len(delta.token_ids), delta.request_finished)

    try:
        for request in requests:
            engine.add(request, take)
        with _interrupts_between_steps() as interrupted:
            while engine.has_work and not errors:
                engine.step()
                if interrupted():
                    raise KeyboardInterrupt
        if errors:
            raise errors[0]
    finally:
        bar.close()
        for request in requests:  # those left over after an error or Ctrl-C
            engine.abort(request.id)
    return completions


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], bool]]:
    """Puts Ctrl-C off to the end of a step, so that the engine stays usable; a second one comes at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """Requests done, and output tokens a second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._progress = None
        self._num_tokens = 0
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests, {task.fields[tokens]} tokens,"),
                TimeElapsedColumn(),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, tokens=0)

    def advance(self, num_tokens: int, request_finished: bool) -> None:
        self._num_tokens += num_tokens
        if self._progress:
            self._progress.update(self._task, advance=int(request_finished), tokens=self._num_tokens)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()
