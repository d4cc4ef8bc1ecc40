"""The check of docs/claims.md: what it finds, in pages with one fault each."""

from __future__ import annotations

import check_claims
import pytest

CLAIMS = check_claims.CLAIMS.read_text(encoding="utf-8")
README = check_claims.README.read_text(encoding="utf-8")
FAULTS = {
    "a claim without a command": ("`pytest tests/cluster` | 10", "tests | 10", "no command"),
    "tests that are gone": ("`pytest tests/cluster` | 10", "`pytest tests/no` | 10", "no tests/no"),
    "a target that is gone": ("| `make faults`", "| `make errors`", "no target errors"),
    "a module that is gone": (
        "`python -m benchmarks.overload`",
        "`python -m benchmarks.underload`",
        "there is no benchmarks.underload",
    ),
    "a script that is gone": (
        "`python tests/support/random_engine_runs.py`",
        "`python tests/support/gone.py`",
        "there is no tests/support/gone.py",
    ),
    "a flag that is gone": ("--only killed", "--nothing killed", "no flag --nothing"),
    "a command that is gone": ("`quickstep why ", "`quickstep whence ", "no command whence"),
    "a promise that is gone": ("| R7 |", "| R70 |", "not R1 to R22"),
    "another claim than README's": ("| what a load needs |", "| a load |", "README's table"),
}


def test_the_pages_have_no_fault() -> None:
    assert list(check_claims.faults(CLAIMS, README)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    before, after, what = FAULTS[name]
    assert CLAIMS.count(before) == 1
    found = list(check_claims.faults(CLAIMS.replace(before, after), README))
    assert any(what in fault for fault in found), found
