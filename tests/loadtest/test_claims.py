"""`loadtest/claims.py`: the claims hold, and the document says what is measured."""

from pathlib import Path

import pytest

import claims
from claims import CLAIMS, DOCUMENT, Result, put


@pytest.fixture(scope="module")
def measured() -> dict[str, Result]:
    return {name: measure() for name, measure in CLAIMS.items()}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_holds_and_stands_in_the_document(name: str, measured: dict[str, Result]) -> None:
    assert measured[name].met
    document = DOCUMENT.read_text()
    assert put(document, name, measured[name].table) == document, "run the command with --write"


def test_paging_wastes_little_and_runs_several_times_as_many(measured: dict[str, Result]) -> None:
    rows = [line.split("|")[2:5] for line in measured["waste"].table.splitlines()[2:]]
    pre_allocated, *paged = [(float(row[0].strip().rstrip("%")), int(row[1])) for row in rows]
    assert pre_allocated[0] < 30
    assert pre_allocated[1] == claims.WASTE_REQUESTS_AT_MOST_LENGTH
    assert len(paged) == 2
    for holding, at_once in paged:
        assert holding >= 100 * claims.WASTE_GOAL
        assert at_once >= 3.5 * pre_allocated[1]


def test_the_command_writes_between_the_marks_and_fails_on_a_goal_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = tmp_path / "claims.md"
    document.write_text("before\n<!-- waste: begin -->\nold\n<!-- waste: end -->\nafter\n")
    monkeypatch.setattr(claims, "DOCUMENT", document)
    monkeypatch.setattr("sys.argv", ["claims", "waste", "--write"])
    monkeypatch.setitem(CLAIMS, "waste", lambda: Result("| new |", met=True))
    claims.main()
    assert document.read_text() == "before\n<!-- waste: begin -->\n| new |\n<!-- waste: end -->\nafter\n"
    assert capsys.readouterr().out == "| new |\n"
    monkeypatch.setitem(CLAIMS, "waste", lambda: Result("| worse |", met=False))
    with pytest.raises(SystemExit, match="the goal is missed: waste"):
        claims.main()
    assert "| worse |" in document.read_text()


def test_a_document_without_the_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="needs one line '<!-- waste: begin -->'"):
        put("nothing\n", "waste", "| new |")
