"""`core` and `sim` are the standard library, msgspec and layer 0: at run time, in their sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quickstep

ROOT = Path(quickstep.__path__[0])
SOURCES = sorted([*(ROOT / "core").glob("**/*.py"), *(ROOT / "sim").glob("**/*.py")])
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "starlette")
# Time, randomness, environment and threads come in as arguments.
FORBIDDEN = {"time", "random", "os", "threading", "logging", "asyncio", "secrets", "datetime"}


def imported(path: Path) -> set[str]:
    """The modules that a module imports when it runs; not those for annotations only."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _is_for_annotations(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names.add(node.module or "")
    return names


def _is_for_annotations(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_importing_core_and_sim_loads_nothing_heavy() -> None:
    modules = [
        ".".join(("quickstep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in SOURCES
    ]
    code = (
        f"import sys\nsys.path.insert(0, {str(ROOT.parent)!r})\n"
        + "".join(f"import {module}\n" for module in modules)
        + f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_module_imports_the_standard_library_msgspec_and_lower_layers_only(path: Path) -> None:
    layers = [
        "quickstep.types",
        "quickstep.config",
        "quickstep.errors",
        "quickstep.json_line",
        "quickstep.sampling_params",
        "quickstep.core",
    ]
    if path.is_relative_to(ROOT / "sim"):
        layers += ["quickstep.core.drafts.choice", "quickstep.sim"]
    for name in imported(path):
        head = name.split(".")[0]
        if head == "quickstep":
            assert ".".join(name.split(".")[:2]) in layers, f"{path.name} imports {name}"
        elif head != "msgspec":
            assert head in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert head not in FORBIDDEN, f"{path.name} imports {name}"
