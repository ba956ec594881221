"""The checks are checked: a named test of the suite fails under each mistake that must never pass."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS, VARIABLE, Mutant, mutated

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120


def run(tests: list[str], mutant: str | None = None) -> str:
    """What pytest says of them: the line of each that failed, and the sum."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    if mutant is not None:
        environment[VARIABLE] = mutant
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "mutants"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert not ran.stderr, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    assert f"FAILED {mutant.caught_by}" in run([mutant.caught_by], mutant.name)


def test_without_a_mutant_the_same_tests_pass() -> None:
    tests = sorted({mutant.caught_by for mutant in MUTANTS})
    assert f"{len(tests)} passed" in run(tests)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_python_and_changes_one_place(mutant: Mutant) -> None:
    """Otherwise a test could fail for another reason than the mistake."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    compile(mutated(mutant, Path(spec.origin).read_text()), mutant.name, "exec")
