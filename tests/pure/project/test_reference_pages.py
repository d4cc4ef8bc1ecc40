"""The pages of docs that list things list all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest
import write_architectures_reference
import write_environment_reference
import write_errors_reference
import write_flags_reference
import write_metrics_reference
import write_python_reference

from quickstep.engine.llm import LLM

ROOT = Path(__file__).parents[3]

PYTHON = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
VARIABLES = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        write_architectures_reference,
        write_environment_reference,
        write_errors_reference,
        write_metrics_reference,
        write_python_reference,
    ],
    ids=lambda page: page.PAGE.name,
)
def test_a_page_is_what_the_declarations_say(page: ModuleType) -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run make reference"


def test_an_error_code_has_to_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = write_errors_reference.raised_codes() | {"new_code"}
    of_batches = write_errors_reference.raised_codes("batches")
    codes = {"": raised, "batches": of_batches}
    monkeypatch.setattr(write_errors_reference, "raised_codes", lambda folder="": codes[folder])
    with pytest.raises(SystemExit, match="new_code"):
        write_errors_reference.text()


def test_a_variable_that_is_read_has_to_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    read = write_environment_reference.read_names()
    monkeypatch.setattr(write_environment_reference, "read_names", lambda: read | {"HF_NEW"})
    with pytest.raises(SystemExit, match="HF_NEW"):
        write_environment_reference.text()


def test_what_varies_in_a_message_is_dots() -> None:
    call = ast.parse("""f'--a is {value}{more}, it must be {high}; ' + end""", mode="eval")
    text = write_errors_reference.message_of(call.body)
    assert text == "--a is ......, it must be ...; ..."


def test_the_flags_of_other_engines_are_those_that_commands_answer() -> None:
    for path, text in write_flags_reference.texts().items():
        assert path.read_text(encoding="utf-8") == text, "run make reference"


def test_the_python_page_has_every_public_method() -> None:
    names = {name for name in vars(LLM) if not name.startswith("_")}
    assert not {name for name in names if f"`{name}" not in PYTHON}


def test_every_definition_for_the_build_is_listed() -> None:
    read = set(re.findall(r"\bQUICKSTEP_[A-Z_]+", (ROOT / "CMakeLists.txt").read_text()))
    for_tests = {"QUICKSTEP_FOR_TESTS", "QUICKSTEP_EMULATED_LEVELS", "QUICKSTEP_SANITIZE"}
    assert not {name for name in read - for_tests if name not in VARIABLES}
