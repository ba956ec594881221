"""`octavo replay`: runs recorded steps again, on this machine, and says what comes out otherwise, or fails.

Owns the command, what it prints, and its exit status: 0 when every step does what it did when it was
recorded; 3 when that includes steps that fail, which are reproduced; 1 when one comes out otherwise; 2 when
the recording cannot be run here. What it knows comes from `engine/recording.py`. The `octavo` script finds
this command by its entry point in the group `octavo.commands`.
"""

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from octavo.engine import recording as recordings
from octavo.engine.recording import Recording, ReplayedStep
from octavo.errors import OctavoError, RecordingError
from octavo.protocol import StepPlan
from octavo.serving import installation

installation.require_extra()

DIFFERS, CANNOT, REPRODUCED = 1, 2, 3


def replay_recording(
    recording: Annotated[Path, typer.Argument(help="A file that `record_steps` or `octavo record` made.")],
    step: Annotated[
        int | None, typer.Option(help="Stop after this step, and show what is in it and where it fails.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is on this machine; by default as recorded.")
    ] = None,
) -> None:
    """Run the steps of a recording again, to reproduce one that failed or came out wrong."""
    try:
        status = _replay(recording, step, model)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        status = CANNOT
    raise typer.Exit(status)


def _replay(path: Path, wanted: int | None, model: str | None) -> int:
    from octavo.worker.executor import open_executor  # torch, which takes a second: not for --help

    recording = Recording.open(path)
    config = dataclasses.replace(
        recording.config,
        model=model or recording.config.model,
        num_gpu_blocks_override=recording.num_blocks,
        record_steps=None,
    )
    for note in _other_than(recording, config.model):
        print(f"note: {note}")
    executor = open_executor(config)
    if executor.num_host_blocks < recording.num_host_blocks:
        raise RecordingError(
            f"its steps use {recording.num_host_blocks} KV blocks of host memory, and there are only "
            f"{executor.num_host_blocks} here, limited by {executor.host_limit}; replay it where more is free"
        )
    status = num_steps = 0
    found = wanted is None
    try:
        for replayed in recordings.replay(recording, executor):
            num_steps += 1
            plan = replayed.recorded.plan
            found = found or plan.step_id == wanted
            _tell(replayed)
            if plan.step_id == wanted:
                _show(replayed)
            if replayed.differences:
                return DIFFERS
            if replayed.failures:
                status = REPRODUCED
            if plan.step_id == wanted:
                break
    finally:
        executor.close()
    if not found:
        print(f"error: {path} has no step {wanted}; it has {num_steps} steps", file=sys.stderr)
        return CANNOT
    print(f"steps that came out as recorded: {num_steps}" + (", failures included" if status else ""))
    return status


def _other_than(recording: Recording, model: str) -> list[str]:
    """What is not here as it was where the recording was made, so that tokens may differ without a fault."""
    notes = []
    for name, was in recording.versions.items():
        if (here := recordings.versions().get(name)) != was:
            notes.append(f"{name} is {here} here, and was {was}")
    files = recordings.model_files(model)
    for name in sorted(files.keys() | recording.model_files.keys()):
        if (here := files.get(name)) != (then := recording.model_files.get(name)):
            notes.append(
                f"the model's {name} is another one: {here or 'none'} here, and was {then or 'none'}"
            )
    return notes


def _tell(step: ReplayedStep) -> None:
    """Nothing of a step that does what it did, unless that was to fail."""
    label = _label(step.recorded.plan)
    for difference in step.differences:
        print(f"{label}: {difference}")
    if not step.differences:
        for failure in step.failures:
            print(f"{label}: fails, as recorded: {failure}")
        if step.recorded.result is None and step.recorded.failure is None:
            here = "fails" if step.failure else "does not fail"
            print(f"{label}: {here}; the recording does not say how it ended")


def _label(plan: StepPlan) -> str:
    return f"step {plan.step_id} ({len(plan.slices)} sequences, {plan.num_tokens} tokens)"


def _show(step: ReplayedStep) -> None:
    """One step in full."""
    plan = step.recorded.plan
    print(f"plan of step {plan.step_id}, where it is not empty:")
    for item in dataclasses.fields(plan):
        for part in getattr(plan, item.name) if item.name != "step_id" else ():
            print(f"  {item.name}: {part}")
    for sequence in step.result.sequences if step.result else ():
        print(f"  result: {sequence}")
    if step.failure is not None:
        print("".join(traceback.format_exception(step.failure)), end="")
