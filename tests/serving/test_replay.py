"""`octavo record` and `octavo replay` on the real engine: the same tokens again, or where they are others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file

from octavo import OctavoError, SamplingParams
from octavo.engine.recording import Recording, model_files
from octavo.errors import StepFailed
from octavo.request import PoolingParams, TextDelta
from octavo.serving.record import record
from octavo.serving.replay import replay_recording
from octavo.worker.model_runner import ModelRunner
from tiny import tiny_llama
from tiny_engine import tiny_engine, whole

ENGINE = {"block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that a plan of a small model can have in it."""
    into = tmp_path_factory.mktemp("steps")
    with whole(tiny_engine(folder, **ENGINE, record_steps=str(into))) as engine:
        prompt = list(range(40, 60))
        embedded: list[TextDelta] = []
        engine.add(engine.make_request("embed", prompt, embed=PoolingParams("mean", None)), embedded.append)
        engine.generate(
            [prompt, list(range(60, 90)), list(range(90, 103)), prompt[:9]],
            [
                SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=30, ignore_eos=True),
                SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=40, ignore_eos=True),
                SamplingParams(use_beam_search=True, beam_width=3, temperature=0, max_tokens=12),
                SamplingParams(seed=1, logit_bias={50: 2.0}, frequency_penalty=1, max_tokens=9),
            ],
        )
        engine.generate([[*prompt, 7]], SamplingParams(temperature=0.7, top_k=5, max_tokens=3))
        stats = engine.stats()
        assert embedded[-1].embedding is not None
        assert stats.preemptions_total > 0
        assert stats.prefix_hits_total > 0
    assert engine.recording is not None
    return engine.recording


Replay = Callable[..., tuple[int, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Runs the command; its status and all that it said."""

    def run(path: Path, step: int | None = None, model: Path | None = None) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(typer.Exit) as ended:
            replay_recording(path, step, None if model is None else str(model))
        said = capsys.readouterr()
        return ended.value.exit_code, said.out + said.err

    return run


def test_a_run_comes_out_the_same_again(recorded: Path, replay: Replay) -> None:
    steps = list(Recording.open(recorded).steps())
    results = [step.result for step in steps if step.result is not None]
    assert len(results) == len(steps)
    for part in ("new", "forks", "copies", "finished", "choices"):
        assert any(getattr(step.plan, part) for step in steps), part
    assert any(result.prompt_logprobs for result in results)
    assert any(result.pooled for result in results)
    assert replay(recorded) == (0, f"steps that came out as recorded: {len(steps)}\n")


def test_one_step_is_shown_in_full_and_is_the_last(recorded: Path, replay: Replay) -> None:
    step = next(step for step in Recording.open(recorded).steps() if step.plan.forks)
    status, said = replay(recorded, step.plan.step_id)
    assert status == 0
    assert f"  forks: {step.plan.forks[0]}\n" in said
    assert f"  slices: {step.plan.slices[0]}\n" in said
    assert step.result is not None
    assert f"  result: {step.result.sequences[0]}\n" in said
    assert said.endswith(f"steps that came out as recorded: {step.plan.step_id}\n")
    status, said = replay(recorded, 9999)
    assert status == 2
    assert f"error: {recorded} has no step 9999; it has " in said


def test_another_token_is_said_with_its_step_and_sequence(
    recorded: Path, replay: Replay, tmp_path: Path
) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    index = [index for index, line in enumerate(lines) if '"sequences":[[' in line][5]
    result = json.loads(lines[index])
    seq_id, (token_id,) = result["result"]["sequences"][0][:2]
    result["result"]["sequences"][0][1] = [token_id + 1]
    changed = tmp_path / "changed"
    changed.write_text("".join((*lines[:index], json.dumps(result) + "\n", *lines[index + 1 :])))
    status, said = replay(changed)
    assert status == 1
    assert said.splitlines()[-1].startswith(f"step {result['result']['step_id']} (")
    assert f"): sequence {seq_id} got tokens [{token_id}] here, tokens [{token_id + 1}] in the" in said


def test_a_recording_that_a_crash_cut_off_is_run_to_its_last_step(
    recorded: Path, replay: Replay, tmp_path: Path
) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.write_text("".join(lines[:-1]) + lines[-1][:20])
    status, said = replay(cut)
    assert status == 0
    last = json.loads(lines[-2])["plan"]["step_id"]
    assert f"step {last} (1 sequences, " in said
    assert "does not fail; the recording does not say how it ended" in said


def test_a_step_that_raises_is_reproduced_with_its_traceback(
    folder: Path, tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.run

    def run_or_raise(self: ModelRunner, inputs: Any) -> Any:
        if 77 in inputs.input_ids:
            raise ZeroDivisionError("made to fail by token 77")
        return forward(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", run_or_raise)
        engine = tiny_engine(folder, record_steps=str(tmp_path))
        errors: list[OctavoError | None] = []
        params = SamplingParams(max_tokens=4, temperature=0)
        for number, prompt in enumerate(([9, 8, 7], [77, 1, 2], [5, 6])):
            engine.add(
                engine.make_request(str(number), prompt, params), lambda delta: errors.append(delta.error)
            )
            engine.step()
        while engine.has_work:
            engine.step()
        engine.close()
        assert sum(isinstance(error, StepFailed) for error in errors) == 2  # the first was in that step too
        assert engine.recording is not None
        path = engine.recording
        label = "step 2 (2 sequences, 4 tokens): "
        message = "step 2 failed: ZeroDivisionError: made to fail by token 77"
        status, said = replay(path)
        assert status == 3
        assert said.startswith(f"{label}fails, as recorded: {message}\n")
        assert said.endswith(", failures included\n")
        status, said = replay(path, 2)
        assert status == 3
        assert "in run_or_raise" in said
        assert said.endswith(f"{message}\nsteps that came out as recorded: 2, failures included\n")
    status, said = replay(path)
    assert status == 1
    assert said == f"{label}here it does not fail; in the recording: {message}\n"


def test_a_model_that_gives_no_numbers_is_reproduced_and_another_model_is_named(
    folder: Path, tmp_path: Path, replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    prompts = tmp_path / "prompts"
    prompts.write_text("the first\nthe second\n")
    arguments = tmp_path / "model.json"
    arguments.write_text(json.dumps({"model": str(broken), "num_threads": 1, "num_gpu_blocks_override": 64}))
    record(prompts, engine=arguments, sampling='{"max_tokens": 3}', into=tmp_path / "steps")
    said = capsys.readouterr()
    (path,) = (tmp_path / "steps").iterdir()
    assert said.out == f"1 steps of 2 prompts, of which 2 failed: {path}\n"
    assert said.err.count("[INTERNAL] the model gave no usable probabilities") == 2

    label = "step 1 (2 sequences, "
    failure = "the model gave no usable probabilities for this sequence's next token (a NaN, or none allowed)"
    status, text = replay(path)
    assert status == 3
    assert text.startswith(label)
    assert text.count("fails, as recorded: sequence ") == 2
    assert text.count(failure) == 2

    status, text = replay(path, model=folder)
    assert status == 1
    was, here = model_files(str(broken)), model_files(str(folder))
    name = "model.safetensors"
    assert f"note: the model's {name} is another one: {here[name]} here, and was {was[name]}\n" in text
    assert f"here, the error '{failure}' in the recording\n" in text

    shutil.rmtree(broken)
    status, text = replay(path)
    assert status == 2
    assert text.startswith("error: 'model' is ")


def test_prompts_that_cannot_be_run_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    for text, sampling, message in (
        (None, "{}", f"the prompts cannot be read from {prompts}"),
        ("\n", "{}", f"{prompts} has no prompts; give one a line"),
        ("a\n", "[]", "'--sampling' is JSON of a list; expected an object"),
        ("a\n", '{"colour": 1}', "unknown sampling parameter 'colour'"),
    ):
        if text is not None:
            prompts.write_text(text)
        with pytest.raises(typer.Exit) as ended:
            record(prompts, model=str(folder), sampling=sampling, into=tmp_path / "steps")
        assert ended.value.exit_code == 1
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "steps").exists()


def test_blocks_that_were_in_host_memory_come_back_from_there(
    folder: Path, tmp_path: Path, replay: Replay
) -> None:
    arguments = {**ENGINE, "num_gpu_blocks_override": 32, "swap_space": 0.01, "preemption_mode": "swap"}
    with whole(tiny_engine(folder, **arguments, record_steps=str(tmp_path))) as engine:
        prompts = [list(range(start, start + 40)) for start in (10, 60, 110, 160)]
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    assert engine.recording is not None
    steps = list(Recording.open(engine.recording).steps())
    assert any(step.plan.swaps_out for step in steps)
    assert any(step.plan.swaps_in for step in steps)
    assert replay(engine.recording) == (0, f"steps that came out as recorded: {len(steps)}\n")


def test_what_is_no_recording_is_said(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "none"
    assert replay(path) == (2, f"error: {path} cannot be read: No such file or directory\n")
