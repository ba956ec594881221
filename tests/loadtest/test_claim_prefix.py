"""The claim `prefix` in short, on a tiny model: what is computed, to the token."""

from functools import partial

import pytest

from claim_prefix import Figure, figures
from tiny import tiny_llama
from tiny_engine import tiny_engine

USERS, CHATS = 12, 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    found = figures(partial(tiny_engine, folder), USERS, CHATS)
    return {figure.label: figure for figure in found}


def test_all_that_can_be_reckoned_is_as_reckoned(measured: dict[str, Figure]) -> None:
    reckoned = [figure for figure in measured.values() if figure.expected is not None]
    assert len(reckoned) == 7
    for figure in reckoned:
        assert figure.on == figure.expected, figure.label


@pytest.mark.parametrize("arrival", ["one after another", "together"])
def test_a_system_prompt_is_computed_once(arrival: str, measured: dict[str, Figure]) -> None:
    figure = measured[f"{arrival}: prompt tokens computed"]
    assert figure.off is not None
    assert figure.off - figure.on == (USERS - 1) * 512


@pytest.mark.parametrize("turn", [2, 3])
def test_a_chat_computes_little_but_its_question(turn: int, measured: dict[str, Figure]) -> None:
    figure = measured[f"{CHATS} chats, turn {turn}: prompt tokens computed"]
    assert figure.off is not None
    # A question, the answer's last token, and of what was said at most what does not fill a block.
    assert CHATS * 13 <= figure.on <= CHATS * (32 + 1 + 15)
    assert figure.off - figure.on >= CHATS * (150 + (turn - 1) * 64 - 16)


def test_a_cell_shows_a_share_a_count_and_a_time() -> None:
    assert Figure("a", 0.5, 1234.0, None).cells()[1:4] == ("50.00%", "1,234", "")
    assert Figure("a", 88.25, 11.0, 11).cells() == ("a", "88.2", "11", "11", "8.0")
