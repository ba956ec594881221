"""The step's host work stays within five times what it is meant to cost: what grows by the square shows."""

import json

import pytest

import step_loop

MOST_MS = {32: 5 * 0.5, 1000: 5 * 4.0}


@pytest.mark.parametrize("num_sequences", MOST_MS)
def test_a_decode_step_costs_little_beside_its_forward(num_sequences: int) -> None:
    report = step_loop.measure(num_sequences, num_steps=20)
    assert 0 < report.step <= MOST_MS[num_sequences]
    assert 0 < report.deliver <= 2 * MOST_MS[num_sequences]


def test_every_sequence_gets_a_token_a_step() -> None:
    loop = step_loop.StepLoop(8, num_steps=40)
    spent = [loop.step() for _ in range(40)]
    assert all(list(step) == [*step_loop.PARTS, "deliver"] for step in spent)
    assert loop.num_running == 0  # the prompts' step gave the first of 41 tokens
    assert loop.num_delivered_tokens == 8 * 41


def test_the_command_prints_a_line_for_each_number_of_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["step_loop", "--sequences", "2", "5", "--steps", "3", "--json"])
    step_loop.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["num_sequences"] for line in lines] == [2, 5]
    assert all(line["step"] > 0 for line in lines)


def test_a_steps_host_work_grows_no_faster_than_its_sequences() -> None:
    """Twice as fast is let pass, for noise: what grows by the square would grow 16 times."""
    few, many = step_loop.measure(250, num_steps=20), step_loop.measure(1000, num_steps=20)
    assert many.step <= 2 * 4 * few.step
