"""The checks of `make check` are tested too: faults planted in a module's text have to be found.

And `make faults` can plant all of its faults.
"""

from __future__ import annotations

import ast

import check_defaults
import check_layers
import plant_faults
import pytest

from quickstep.config import CacheConfig, EngineConfig
from quickstep.option import options_of

BLOCK_SIZE = options_of(CacheConfig)["block_size"].default
DEFAULT_TWICE = {
    "parameter": f"def open_pool(block_size: int = {BLOCK_SIZE}) -> None: ...",
    "keyword": f"def open_pool(*, block_size: int = {BLOCK_SIZE}) -> None: ...",
    "field": f"class Pool:\n    block_size: int = {BLOCK_SIZE}",
    "product": f"def open_pool(block_size: int = 2 * {BLOCK_SIZE // 2}) -> None: ...",
    "flag": f'parser.add_argument("--block-size", type=int, default={BLOCK_SIZE})',
    "help": f'HELP = "tokens per KV block (default: {BLOCK_SIZE})"',
}
NO_FAULT = {
    "another value": f"def open_pool(block_size: int = {BLOCK_SIZE + 1}) -> None: ...",
    "another name": f"def open_pool(tile: int = {BLOCK_SIZE}) -> None: ...",
    "no literal": "def open_pool(block_size: int = DEFAULTS.block_size) -> None: ...",
    "no default": 'parser.add_argument("--block-size", type=int)',
}
LATE = "def load() -> None:\n    {}"


def default_faults(text: str) -> list[str]:
    known = check_defaults.known_options()
    return [message for _, message in check_defaults.faults_of(ast.parse(text), known)]


@pytest.mark.parametrize("where", DEFAULT_TWICE)
def test_a_default_that_is_written_twice_is_found(where: str) -> None:
    (fault,) = default_faults(DEFAULT_TWICE[where])
    assert "derive it" in fault if where == "help" else "--block-size" in fault


@pytest.mark.parametrize("what", NO_FAULT)
def test_another_default_is_no_fault(what: str) -> None:
    assert default_faults(NO_FAULT[what]) == []


def test_every_option_with_a_telling_default_is_known() -> None:
    known = check_defaults.known_options()
    for field in EngineConfig.__struct_fields__:
        section = getattr(EngineConfig(), field)
        if hasattr(section, "__struct_fields__"):
            assert options_of(type(section)).keys() <= known.keys()


@pytest.mark.parametrize(
    ("path", "line", "is_fault"),
    [
        ("core/scheduler.py", "from quickstep.core import step", True),
        ("core/scheduler.py", "import json", True),
        ("ops/tensors.py", "import torch.nn", False),
        ("cli/doctor.py", "import json", False),
        ("ops/resolve.py", "from quickstep.ops import reference", False),
    ],
)
def test_an_import_inside_a_function_is_for_torch_or_listed(
    path: str, line: str, is_fault: bool
) -> None:
    trees = {path: ast.parse(LATE.format(line))}
    faults = [fault for fault in check_layers.late_faults(trees) if path in fault]
    assert bool([fault for fault in faults if "inside a function" in fault]) == is_fault


def test_a_listed_module_without_such_imports_is_named() -> None:
    listed = "ops/resolve.py"
    faults = list(check_layers.late_faults({listed: ast.parse("import json")}))
    assert any(f"{listed} imports nothing inside functions" in fault for fault in faults)


@pytest.mark.parametrize("name", plant_faults.read_faults())
def test_a_fault_can_be_planted(name: str) -> None:
    fault = plant_faults.read_faults()[name]
    source = (plant_faults.ROOT / fault.path).read_text(encoding="utf-8")
    planted = fault.planted(source)
    assert planted != source
    if not fault.is_native:
        compile(planted, fault.file, "exec")
    assert fault.effect.endswith(".")
    for suite in fault.suites:
        assert (plant_faults.ROOT / "tests" / suite).is_file(), suite


def test_a_text_that_is_not_there_once_is_no_fault() -> None:
    fault = plant_faults.Fault("area", "core/step.py", "one", "two", "It shows.", ())
    for source in ("", "one one"):
        with pytest.raises(ValueError, match="not once"):
            fault.planted(source)


def test_the_table_of_faults_names_what_found_them() -> None:
    faults = {
        name: plant_faults.Fault(area, "f.py", "a", "b", "It shows.", ())
        for name, area in (("one", "pool"), ("two", "ledger"), ("three", "pool"))
    }
    outcomes = [
        plant_faults.Outcome("two", "not found", 3.6),
        plant_faults.Outcome("three", "pure/test_x.py::test_y[a|b]", 1.2),
        plant_faults.Outcome("one", "pure/test_x.py", 0.4),
        plant_faults.Outcome("gone", "pure/test_x.py", 0.4),  # of an earlier list
    ]
    assert plant_faults.table(faults, outcomes).splitlines() == [
        "2 of 3 faults are found.",
        "",
        "| area | fault | what a user would see | found by | s |",
        "|---|---|---|---|---:|",
        "| pool | three | It shows. | `pure/test_x.py::test_y[a\\|b]` | 1 |",
        "| pool | one | It shows. | `pure/test_x.py` | 0 |",
        "| ledger | two | It shows. | **not found** | 4 |",
    ]
