"""`loadtest/claims.py`: exact claims hold, and the document shows what was measured."""

import re
from pathlib import Path

import pytest

import claim_waste
import claims
from claim import Bar, Claim, Panel, Result, markdown, svg
from claims import CLAIMS, DOCUMENT, plot_of, put

SOME = (Panel("speed", (Bar("off", 2, "2.0", off=True), Bar("on <&>", 8, "8.0"))),)


def section(name: str) -> str:
    document = DOCUMENT.read_text()
    return document.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0]


@pytest.fixture(scope="module")
def measured() -> dict[str, Result]:
    return {name: claim.measure() for name, claim in CLAIMS.items() if claim.exact}


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.exact])
def test_an_exact_claim_holds_and_stands_in_the_document(name: str, measured: dict[str, Result]) -> None:
    assert measured[name].met
    document = DOCUMENT.read_text()
    assert put(document, name, measured[name].table) == document, "run the command with --write"
    assert plot_of(name).read_text() == svg(measured[name].panels), "run the command with --plots"


@pytest.mark.parametrize("name", CLAIMS)
def test_each_claim_has_a_table_and_a_plot_of_the_same_figures(name: str) -> None:
    cells = {cell.strip() for line in section(name).splitlines() for cell in line.split("|")}
    shown = re.findall(r'class="value"[^>]*>([^<]+)<', plot_of(name).read_text())
    assert len(shown) >= 2
    assert set(shown) <= cells, "run the command with --write --plots"
    assert f"](claims/{name}.svg)" in DOCUMENT.read_text()
    assert f"python loadtest/claims.py {name}" in DOCUMENT.read_text()


def test_paging_wastes_little_and_runs_several_times_as_many(measured: dict[str, Result]) -> None:
    rows = [line.split("|")[2:5] for line in measured["waste"].table.splitlines()[2:]]
    pre_allocated, *paged = [(float(row[0].strip().rstrip("%")), int(row[1])) for row in rows]
    assert pre_allocated[0] < 30
    assert pre_allocated[1] == claim_waste.REQUESTS_AT_MOST_LENGTH
    assert len(paged) == 2
    for holding, at_once in paged:
        assert holding >= 100 * claim_waste.GOAL
        assert at_once >= 3.5 * pre_allocated[1]


def test_the_command_writes_between_the_marks_and_fails_on_a_goal_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = tmp_path / "claims.md"
    document.write_text("before\n<!-- waste: begin -->\nold\n<!-- waste: end -->\nafter\n")
    monkeypatch.setattr(claims, "DOCUMENT", document)
    monkeypatch.setattr("sys.argv", ["claims", "waste", "--write", "--plots"])
    monkeypatch.setitem(CLAIMS, "waste", Claim(lambda: Result("| new |", True, SOME), exact=True))
    claims.main()
    assert document.read_text() == "before\n<!-- waste: begin -->\n| new |\n<!-- waste: end -->\nafter\n"
    assert (tmp_path / "claims" / "waste.svg").read_text() == svg(SOME)
    assert capsys.readouterr().out == "| new |\n"
    monkeypatch.setitem(CLAIMS, "waste", Claim(lambda: Result("| worse |", False, SOME), exact=True))
    with pytest.raises(SystemExit, match="the goal is missed: waste"):
        claims.main()
    assert "| worse |" in document.read_text()


def test_a_document_without_the_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="needs one line '<!-- waste: begin -->'"):
        put("nothing\n", "waste", "| new |")


def test_a_table_is_markdown() -> None:
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_bars_are_as_long_as_their_values_beside_the_longest() -> None:
    image = svg(SOME)
    widths = [float(width) for width in re.findall(r'<rect class="o\w+" .*? width="([\d.]+)"', image)]
    assert widths[0] == pytest.approx(widths[1] / 4)
    assert "on &lt;&amp;&gt;" in image
    assert image.count('class="off"') == image.count('class="on"') == 1
