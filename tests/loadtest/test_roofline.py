"""`loadtest/roofline.py`: what a step costs, by hand, and a card that is found again from its steps."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from octavo.models.model_config import ModelConfig
from octavo.protocol import Slice, StepPlan
from octavo.weights.loader import open_checkpoint
from offline import SMOLLM2
from roofline import CARDS, SHAPES, Card, ModelShape, StepWork, fit, named, step_s, work_of

SHAPE = ModelShape(
    parameters=1000,
    output_parameters=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_size=8,
    dtype_bytes=2,
)


def test_the_work_of_a_step_by_hand() -> None:
    chunk, decode = Slice(1, 4, 3), Slice(2, 9, 1, samples=(2,))
    work = work_of(StepPlan(1, (chunk, decode)), SHAPE)
    pairs = (5 + 6 + 7) + 10  # of a token and one that it sees
    assert work.linear_flops == 2 * (900 * 4 + 100 * 1)
    assert work.linear_bytes == 2 * 1000
    assert work.attention_flops == 2 * 2 * pairs * (2 * 4 * 8)
    assert work.attention_bytes == (7 + 10) * (2 * 2 * 1 * 8 * 2)
    only_chunk = work_of(StepPlan(1, (chunk,)), SHAPE)
    assert only_chunk.linear_flops == 2 * 900 * 3
    assert only_chunk.linear_bytes == 2 * 900, "nothing is sampled, so the output layer is not read"


def test_each_part_of_a_step_is_as_slow_as_the_slower_of_its_two_sides() -> None:
    card = Card(flops_per_s=100, bytes_per_s=10, overhead_s=1)
    assert step_s(card, StepWork(1000, 50, 0, 0)) == 1 + 10
    assert step_s(card, StepWork(1000, 150, 0, 0)) == 1 + 15
    assert step_s(card, StepWork(1000, 50, 200, 60)) == 1 + 10 + 6
    assert step_s(card, StepWork(1000, 50, 800, 60)) == 1 + 10 + 8
    assert step_s(replace(card, attention_share=0.5), StepWork(1000, 50, 800, 60)) == 1 + 10 + 16


def test_a_card_is_found_again_from_its_steps_however_some_were_interrupted() -> None:
    rng = random.Random(3)
    card = Card(flops_per_s=4e11, bytes_per_s=2e10, overhead_s=1.5e-3, attention_share=0.6)
    works = []
    for _ in range(300):
        slices = tuple(
            Slice(i, rng.randrange(500), rng.choice((1, 1, 1, 200)), samples=(i,))
            for i in range(rng.randint(1, 32))
        )
        works.append(work_of(StepPlan(1, slices), SHAPES["smollm2-135m"]))
    times = [step_s(card, work) for work in works]
    found = fit(works, times)
    assert found.flops_per_s == pytest.approx(card.flops_per_s, rel=0.01)
    assert found.bytes_per_s == pytest.approx(card.bytes_per_s, rel=0.01)
    assert found.overhead_s == pytest.approx(card.overhead_s, rel=0.05)
    assert found.attention_share == pytest.approx(card.attention_share, rel=0.02)

    times[::50] = [10 * time_s for time_s in times[::50]]  # interrupted
    found = fit(works, times)
    assert found.flops_per_s == pytest.approx(card.flops_per_s, rel=0.1)
    assert found.bytes_per_s == pytest.approx(card.bytes_per_s, rel=0.1)


def test_no_step_has_an_overhead_below_nothing() -> None:
    works = [StepWork(0, bytes_, 0, 0) for bytes_ in (100, 200, 400)]
    found = fit(works, [0.5, 1.5, 3.5])  # a line through -0.5
    assert found.overhead_s == 0
    assert found.attention_share == 1  # of which they tell nothing
    # Least squares of t / measured - 1, with t = bytes / rate: the rate is the sum of squares over the sum.
    shares = [100 / 0.5, 200 / 1.5, 400 / 3.5]
    assert found.bytes_per_s == pytest.approx(sum(share**2 for share in shares) / sum(shares), rel=1e-6)


@pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 1.0, 0.0]])
def test_too_few_steps_or_times_of_nothing_are_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="give a time above 0 for each of 3"):
        fit([StepWork(1, 1, 0, 0)] * 3, times)


def test_a_shape_comes_from_a_models_own_configuration() -> None:
    config = ModelConfig.from_dict(open_checkpoint(SMOLLM2).config())
    assert ModelShape.of(config, 2) == SHAPES["smollm2-135m"]


def test_cards_and_shapes_by_name_or_from_a_file(tmp_path: Path) -> None:
    assert named(Card, "h100") is CARDS["h100"]
    assert named(ModelShape, "llama-8b") is SHAPES["llama-8b"]
    file = tmp_path / "card.json"
    file.write_text(json.dumps(asdict(CARDS["l4"])))
    assert named(Card, str(file)) == CARDS["l4"]
    with pytest.raises(ValueError, match="'h1000' is neither a file nor one of h100, a100, l4"):
        named(Card, "h1000")
    file.write_text('{"flops": 1}')
    with pytest.raises(ValueError, match="its fields are flops_per_s, bytes_per_s, overhead_s, memory_bytes"):
        named(Card, str(file))
