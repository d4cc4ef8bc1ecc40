"""The pages of docs that list things list all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_flags_reference
import write_metrics_reference

from quickstep.engine.llm import LLM, LLMOptions

ROOT = Path(__file__).parents[3]

PYTHON = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
VARIABLES = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")


def test_the_metrics_are_those_of_a_server() -> None:
    page = write_metrics_reference.PAGE.read_text(encoding="utf-8")
    assert write_metrics_reference.text() == page, "run make reference"


def test_the_flags_of_other_engines_are_those_that_commands_answer() -> None:
    for path, text in write_flags_reference.texts().items():
        assert path.read_text(encoding="utf-8") == text, "run make reference"


@pytest.mark.parametrize("option", LLMOptions.__annotations__)
def test_the_python_page_has_every_option(option: str) -> None:
    assert f"`{option}`" in PYTHON


def test_the_python_page_has_every_public_method() -> None:
    names = {name for name in vars(LLM) if not name.startswith("_")}
    assert not {name for name in names if f"`{name}" not in PYTHON}


def test_every_variable_of_ours_is_listed() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "CMakeLists.txt"]
    read = {
        name for file in sources for name in re.findall(r"\bQUICKSTEP_[A-Z_]+", file.read_text())
    }
    for_tests = {"QUICKSTEP_FOR_TESTS", "QUICKSTEP_EMULATED_LEVELS"}
    assert not {name for name in read - for_tests if name not in VARIABLES}
