"""Recorded steps: written whole, read back equal whatever a plan holds, and run again in order."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from octavo.config import EngineConfig
from octavo.engine.recording import RecordedStep, Recorder, Recording, ReplayedStep, model_files, replay
from octavo.errors import ConfigError, RecordingError, StepFailed
from octavo.protocol import PooledPrompt, SequenceResult, Slice, StepPlan, StepResult

PLAN = StepPlan(4, (Slice(1, 0, 3, 0, (6, 7), (1, 2)), Slice(3, 4, 1)))
RESULT = StepResult(4, (SequenceResult(1, (5,)), SequenceResult(2, error="NaN")), 0.25, 0.125)


def example(kind: Any, numbers: Iterator[int]) -> Any:
    """An object of a type of `protocol.py` in which nothing is empty, and no two numbers are the same."""
    if get_origin(kind) in (Union, UnionType):
        return example(get_args(kind)[0], numbers)
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        inner = inner[:1] * 2 if inner[-1] is Ellipsis else inner
        return tuple(example(each, numbers) for each in inner)
    if is_dataclass(kind) or issubclass(kind, tuple):
        return kind(**{name: example(each, numbers) for name, each in get_type_hints(kind).items()})
    made: dict[type, Callable[[int], Any]] = {
        int: lambda number: 2**64 - number,
        float: lambda number: 1 / number,
        str: "text {}".format,
        bool: lambda _: True,
    }
    assert kind in made, f"a plan or a result has {kind}, of which a recording is not known to give it back"
    return made[kind](next(numbers))


class FakeExecutor:
    """Gives `RESULT`, fails the steps of these ids, and is interrupted in others."""

    def __init__(self, failing: tuple[int, ...] = (), interrupted: tuple[int, ...] = ()) -> None:
        self.num_blocks, self.num_host_blocks = 7, 3
        self.result = RESULT
        self.plans: list[StepPlan] = []
        self.closed = False
        self._failing, self._interrupted = failing, interrupted

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        step_id = self.plans[-1].step_id
        if step_id in self._failing:
            raise StepFailed(f"step {step_id} is made to fail")
        if step_id in self._interrupted:
            raise KeyboardInterrupt
        return replace(self.result, step_id=step_id)

    def close(self, *kept: object) -> None:
        self.closed = True


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    return EngineConfig(str(model), record_steps=str(tmp_path / "new" / "steps"), max_model_len=64)


def run(recorder: Recorder, *step_ids: int) -> Path:
    for step_id in step_ids:
        recorder.submit(replace(PLAN, step_id=step_id))
        try:
            recorder.collect()
        except (StepFailed, KeyboardInterrupt):
            continue
    recorder.close()
    return recorder.path


def step(step_id: int) -> RecordedStep:
    return RecordedStep(replace(PLAN, step_id=step_id), replace(RESULT, step_id=step_id))


def test_all_that_a_plan_and_a_result_can_have_is_read_back_equal(config: EngineConfig) -> None:
    """By the types of their fields, so that a field that is new is in here too."""
    numbers = itertools.count(1)
    plan, result = example(StepPlan, numbers), example(StepResult, numbers)
    executor = FakeExecutor()
    recorder = Recorder(executor, config)
    executor.result = result
    for steps in ((plan, result), (PLAN, RESULT)):
        recorder.submit(steps[0])
        executor.result = steps[1]
        assert recorder.collect() == replace(steps[1], step_id=steps[0].step_id)
    assert executor.plans == [plan, PLAN]
    recorder.close()
    assert executor.closed
    (first, second) = Recording.open(recorder.path).steps()
    assert first == RecordedStep(plan, replace(result, step_id=plan.step_id))
    assert second == RecordedStep(PLAN, RESULT)


def test_infinities_come_back(config: EngineConfig) -> None:
    recorder = Recorder(executor := FakeExecutor(), config)
    executor.result = replace(RESULT, pooled=(PooledPrompt(1, (math.inf, -math.inf)),))
    (only,) = Recording.open(run(recorder, 4)).steps()
    assert only.result == executor.result


def test_a_recording_says_what_ran_and_is_for_nobody_else(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(FakeExecutor(), config)
    assert (recorder.num_blocks, recorder.num_host_blocks) == (7, 3)
    path = run(recorder)
    assert path.parent == Path(config.record_steps or "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert f"prompts' token ids among them, into {path}" in caplog.text
    recording = Recording.open(path)
    assert (recording.config, recording.num_blocks, recording.num_host_blocks) == (config, 7, 3)
    assert {"octavo", "torch", "python", "system"} <= recording.versions.keys()
    assert recording.model_files == model_files(config.model)
    assert list(recording.steps()) == []


def test_models_are_told_apart_by_size_and_by_both_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not of the model")
    weights = tmp_path / "model.safetensors"
    seen = []
    for content in (b"a" * 200_000, b"a" * 199_999 + b"b", b"b" + b"a" * 199_999, b"a" * 200_001):
        weights.write_bytes(content)
        found = model_files(str(tmp_path))
        assert list(found) == ["config.json", "model.safetensors"]
        seen.append(found["model.safetensors"])
    assert len(set(seen)) == 4
    assert seen[0].startswith("200000 bytes, ")


def test_each_run_has_a_file_of_its_own(config: EngineConfig) -> None:
    assert run(Recorder(FakeExecutor(), config)) != run(Recorder(FakeExecutor(), config))


def test_a_folder_that_takes_no_file_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'record_steps' is .*model.gguf', where no file can be made"
    ) as error:
        Recorder(FakeExecutor(), replace(config, record_steps=str(tmp_path / "model.gguf")))
    assert error.value.key == "record_steps"


def test_what_an_older_version_did_not_know_is_at_its_default(config: EngineConfig) -> None:
    path = run(Recorder(FakeExecutor(), config), 1)
    text = path.read_text()
    assert "[1,0,3,0,[6,7],[1,2]]" in text
    path.write_text(text.replace("[1,0,3,0,[6,7],[1,2]]", "[1,0,3]"))
    (only,) = Recording.open(path).steps()
    assert only.plan.slices[0] == Slice(1, 0, 3)


def test_a_file_ends_where_it_was_to_end_with_a_step_that_is_whole(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    head = len(run(Recorder(FakeExecutor(), config)).read_text())
    two = len(run(Recorder(FakeExecutor(), config), 1, 2).read_text())
    caplog.clear()
    path = run(Recorder(FakeExecutor(), replace(config, record_steps_bytes=head + 1)), 1, 2, 3, 4)
    assert list(Recording.open(path).steps()) == [step(1)]
    assert [r.message for r in caplog.records if "ends here" in r.message] == [
        f"the recording {path} ends here: it has reached 'record_steps_bytes'"
    ]
    path = run(Recorder(FakeExecutor(), replace(config, record_steps_bytes=two + 100)), 1, 2, 3, 4)
    assert list(Recording.open(path).steps()) == [step(1), step(2), step(3)]


def test_a_full_disk_ends_the_recording_and_nothing_else(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(executor := FakeExecutor(), config)
    recorder._file.close()
    recorder._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    run(recorder, 1, 2)
    assert len(executor.plans) == 2
    (told,) = [record for record in caplog.records if "ends here" in record.message]
    assert "it cannot be written to: No space left" in told.message
    assert told.levelno == logging.WARNING


def test_a_crash_may_cut_off_the_last_line_or_the_last_result(config: EngineConfig) -> None:
    path = run(Recorder(FakeExecutor(), config), 1, 2)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:-10])
    expected = [step(1), replace(step(2), result=None)]
    assert list(Recording.open(path).steps()) == expected
    path.write_text("".join(lines[:-1]))
    assert list(Recording.open(path).steps()) == expected
    path.write_text("".join(lines[:-2]) + lines[-2][:30])
    assert list(Recording.open(path).steps()) == [step(1)]


def test_a_step_that_was_interrupted_has_no_end(config: EngineConfig) -> None:
    path = run(Recorder(FakeExecutor(interrupted=(1,)), config), 1, 2)
    assert list(Recording.open(path).steps()) == [replace(step(1), result=None), step(2)]


HEAD = (
    '{"octavo_recording": 1, "num_blocks": 1, "num_host_blocks": 0, "versions": {}, "model_files": {}, '
    '"config": {"model": "m"}}\n'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file is no recording: its first line does not say so"),
        ("{}\n", "file is no recording: its first line does not say so"),
        ("nothing\n", "file, line 1: Expecting value"),
        ("[]\n", "file, line 1: it is no JSON object"),
        ('{"octavo_recording": 2}\n', "is a recording of version 2; this Octavo reads version 1"),
        (HEAD.replace('"num_blocks": 1, ', ""), "line 1: this Octavo cannot use it: KeyError.'num_blocks'"),
        (HEAD.replace('"m"}', '"m", "colour": 1}'), "line 1: this Octavo cannot use it: TypeError.*'colour'"),
        (HEAD.replace('"m"', '""'), "line 1: this Octavo cannot use it: ConfigError"),
        (HEAD + '{"plan": {"colour": 1}}\n', "line 2: it is no step: KeyError.'colour'"),
        (HEAD + '{"plan": 5}\n', "line 2: it is no step: AttributeError"),
        (HEAD + '{"plan": {"step_id": 1, "slices": [[5]]}}\n', "line 2: it is no step: TypeError.*'start'"),
        (HEAD + '{"plan"\n{"result": 1}\n', "line 2: Expecting ':'"),
        (HEAD + "\udcff\n", "line 2: 'utf-8' codec can't decode"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(RecordingError, match=message):
        list(Recording.open(path).steps())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="nowhere cannot be read: No such file"):
        Recording.open(tmp_path / "nowhere")


def test_a_failure_is_reproduced_and_the_steps_behind_it_are_run(config: EngineConfig) -> None:
    recording = Recording.open(run(Recorder(FakeExecutor(failing=(2,)), config), 1, 2, 3))
    assert [one.failure for one in recording.steps()] == [None, "step 2 is made to fail", None]
    executor = FakeExecutor(failing=(2,))
    again = list(replay(recording, executor))
    assert executor.plans == [one.plan for one in recording.steps()]
    assert [one.differences for one in again] == [[], [], []]
    lost = "sequence 2: NaN"
    assert [one.failures for one in again] == [[lost], ["step 2 is made to fail"], [lost]]


def test_a_step_that_fails_on_one_side_only_ends_the_replay(config: EngineConfig) -> None:
    recording = Recording.open(run(Recorder(FakeExecutor(failing=(2,)), config), 1, 2, 3))
    assert [one.differences for one in replay(recording, FakeExecutor())] == [
        [],
        ["here it does not fail; in the recording: step 2 is made to fail"],
    ]
    assert [one.differences for one in replay(recording, FakeExecutor(failing=(1,)))] == [
        ["here it fails: step 1 is made to fail; in the recording it does not"]
    ]


def test_another_token_or_error_is_a_difference() -> None:
    was = replace(RESULT, sequences=(SequenceResult(1, (6,)), SequenceResult(2, (9,))))
    assert ReplayedStep(RecordedStep(PLAN, was), RESULT, None).differences == [
        "sequence 1 got tokens [5] here, tokens [6] in the recording",
        "sequence 2 got the error 'NaN' here, tokens [9] in the recording",
    ]
    slower = replace(RESULT, forward_s=9.0)
    assert ReplayedStep(RecordedStep(PLAN, slower), RESULT, None).differences == []
    assert ReplayedStep(RecordedStep(PLAN), None, StepFailed("here")).differences == []
