"""`octavo record`: runs prompts through an engine of its own and records every step, for `octavo replay`.

Owns the command and what it prints; its exit status is 0 also when requests fail, for that is what is to be
recorded, and 1 when nothing could be run. A server records with the engine argument `record_steps`. The
`octavo` script finds this command by its entry point in the group `octavo.commands`.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import InvalidArgument, OctavoError
from octavo.request import SamplingParams, TextDelta
from octavo.serving import installation, model_settings, strict_json

installation.require_extra()


def record(
    prompts: Annotated[Path, typer.Argument(help="A file with a prompt in each line; - is standard input.")],
    model: Annotated[
        str | None, typer.Option(help="A GGUF file, a Hugging Face folder, or pkg://PACKAGE/FILE.")
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="A model.json, with the engine arguments that the server has.")
    ] = None,
    sampling: Annotated[
        str, typer.Option(help="Sampling parameters of all prompts, as in a request: JSON.")
    ] = "{}",
    into: Annotated[Path, typer.Option(help="The folder in which a new file is made.")] = Path(),
) -> None:
    """Run prompts together and record every step, to send with a report of what went wrong."""
    try:
        arguments = model_settings.engine_arguments(engine) if engine else {}
        if model is not None:
            arguments["model"] = model
        _record(_lines(prompts), {**arguments, "record_steps": str(into)}, sampling)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _record(prompts: list[str], arguments: dict[str, object], sampling: str) -> None:
    from octavo.engine.engine import Engine  # torch, which takes a second: not for --help

    params = SamplingParams.parse(strict_json.load_object(sampling, "--sampling"))
    made = Engine(arguments)
    failed = 0

    def take(delta: TextDelta) -> None:
        nonlocal failed
        if delta.error is not None:
            failed += 1
            print(f"prompt {delta.request_id}: {delta.error.wire}", file=sys.stderr)

    try:
        requests = [made.make_request(str(number), text, params) for number, text in enumerate(prompts, 1)]
        for request in requests:
            made.add(request, take)
        while made.has_work:
            made.step()
    finally:
        made.close()
    print(
        f"{made.steps.num_steps} steps of {len(prompts)} prompts, of which {failed} failed: {made.recording}"
    )


def _lines(path: Path) -> list[str]:
    """Raises `InvalidArgument`."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the prompts cannot be read from {path}: {error}") from error
    lines = [line for line in text.splitlines() if line]
    if not lines:
        raise InvalidArgument(f"{path} has no prompts; give one a line")
    return lines
